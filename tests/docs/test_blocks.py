"""The code blocks of the documents: each is run as by a reader, or marked with a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import CHEAP_TLS, LocalServer
from tests.conftest import client_environment
from tests.docs.conftest import MODEL
from tests.docs.documents import DOCUMENTS, ROOT, SHELL, Block, blocks_of, commands_of, name_of

pytestmark = [pytest.mark.process, pytest.mark.slow]

BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
PATIENCE_S = 300
PRELUDE = r"""
set -euo pipefail

# As a reader has it: a server in another terminal, and a message about what this machine lacks.
ndif() {
    case "${1-} ${2-}" in
    "local start")
        local log="$HOME/local.$RANDOM.log"
        command ndif "$@" > "$log" 2>&1 &
        echo $! >> "$HOME/terminals"
        until grep -q "Serving at" "$log"; do
            kill -0 $! || { cat "$log"; return 1; }
            sleep 0.1
        done ;;
    start*)
        command ndif stop > "$HOME/stop.log" 2>&1 || [ $? = 3 ]
        [[ " $* " == *" --detach "* ]] || set -- "$@" --detach
        command ndif "$@" ;;
    doctor*)
        command ndif "$@" || [ $? = 1 ] ;;
    *)
        command ndif "$@" ;;
    esac
}
close_terminals() {
    [ -e "$HOME/terminals" ] || return 0
    for pid in $(cat "$HOME/terminals"); do
        kill "$pid" 2> "$HOME/kill.log" || true
        while kill -0 "$pid" 2> "$HOME/kill.log"; do sleep 0.1; done
    done
    rm "$HOME/terminals"
}
leave() {
    local code=$?
    close_terminals
    command ndif stop > "$HOME/stop.log" 2>&1 || [ $? = 3 ]
    exit $code
}
trap leave EXIT
"""


def of_pages(*languages: str) -> list[Any]:
    """Return the blocks in these languages that are run, page by page."""
    pages = []
    for document in DOCUMENTS:
        blocks = [
            block
            for block in BLOCKS
            if block.document == document and block.language in languages and not block.why_not_run
        ]
        if blocks:
            pages.append(pytest.param(blocks, id=name_of(document)))
    return pages


@pytest.mark.parametrize("blocks", of_pages(*SHELL))
def test_shell_blocks_run(blocks: list[Block], home: Path, tiny_gpt2: Path) -> None:
    (home / "my-checkpoint").symlink_to(tiny_gpt2)
    commands = [words for block in blocks for words in commands_of(block.text)]
    parts = [PRELUDE]
    if ["ndif", "status"] in commands and not any(
        words[:2] == ["ndif", "start"] for words in commands
    ):
        parts.append("ndif start")  # the page assumes a running server
    parts += [
        f"echo '--- {block.place}'\n(\n{block.text}\n)\nclose_terminals\n" for block in blocks
    ]
    run = subprocess.run(
        ["bash", "-c", "\n".join(parts)],
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout
    if ["ndif", "probe"] in commands:  # the probe's key has only default rights
        assert re.search(r"openai-community/gpt2\W+0\.8\W+ok\b", run.stdout), run.stdout


@pytest.fixture(scope="module")
def served(hub: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    environment = {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "NDIF_SESSION_ROOT": str(tmp_path_factory.mktemp("session")),
    }
    started = LocalServer(MODEL, environment=environment)
    try:
        yield started.ready()
    finally:
        started.stop()


def test_python_blocks_run(served: LocalServer, tmp_path: Path) -> None:
    """Run all pages in one process, which imports nnsight once; tracebacks name page and line."""
    scripts = []
    for page in of_pages("python"):
        (blocks,) = page.values
        lines: list[str] = []
        for block in blocks:  # at their lines in the page
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
        script = tmp_path / page.id.replace("/", "-").replace(".md", ".py")
        script.write_text("\n".join(lines))
        scripts.append(script)
    assert len(scripts) >= 3
    environment = {**os.environ, **CHEAP_TLS, **client_environment(served, tmp_path / "hf", None)}
    run_each = "import runpy, sys\nfor each in sys.argv[1:]: runpy.run_path(each)"
    run = subprocess.run(
        [sys.executable, "-c", run_each, *scripts],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout


def test_not_run_marks_precede_block_and_name_reason() -> None:
    texts = (document.read_text() for document in DOCUMENTS)
    marks = sum(len(re.findall("^<!-- not run:", text, re.MULTILINE)) for text in texts)
    marked = [block for block in BLOCKS if block.why_not_run]
    assert len(marked) == marks, "a mark stands in the line before its block"
    assert all(len(block.why_not_run.split()) > 1 for block in marked)


def test_files_and_make_targets_named_in_blocks_exist() -> None:
    targets = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    missing = []
    for block in BLOCKS:
        for words in commands_of(block.text) if block.language in SHELL else ():
            if words[0] == "make":
                named = {word for word in words[1:] if "=" not in word}
                missing += [f"{block.place}: make {name}" for name in sorted(named - targets)]
            missing += [
                f"{block.place}: {word}"
                for word in words
                if re.match(r"(tests|examples|bench|deploy|docs)/", word)
                if not (ROOT / word.partition("::")[0]).exists()
            ]
    assert not missing, "\n".join(missing)
