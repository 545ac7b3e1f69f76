"""`ndif doctor` as an operator reads it, and a server that will not start where it says no."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.clients.harness import NDIF
from tests.sandbox.confinement.test_layers import LANDLOCK, SECCOMP, without, without_package

PATIENCE_S = 60
REFUSAL = r"Untrusted code cannot be confined on this machine: it lacks"


def ndif(
    kernel: str, *arguments: str | Path, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    done = subprocess.run(
        without(kernel, NDIF, *arguments),
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if f"│ {name} " in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_all_layers_are_present() -> None:
    code, said = ndif("", "doctor")
    assert code == 0
    assert row(said, LANDLOCK)[1:3] == ["yes", "yes"]
    assert row(said, SECCOMP)[1:] == ["yes", "yes", "an allow-list"]
    assert "Untrusted code runs confined on this machine." in said
    assert "refused" not in said


def test_it_prints_json() -> None:
    code, said = ndif("", "doctor", "--json")
    answer = json.loads(said)
    assert code == 0
    assert answer.keys() == {"layers", "safe"}
    assert answer["safe"] is True
    for layer in answer["layers"]:
        assert layer.keys() == {"name", "present", "required", "detail"}
        assert layer["present"] or not layer["required"]


@pytest.mark.parametrize(
    ("kernel", "lacking"),
    [
        ("landlock", [LANDLOCK]),
        ("seccomp", [SECCOMP]),
        ("landlock+seccomp", [LANDLOCK, SECCOMP]),
    ],
)
def test_a_missing_layer_is_reported(kernel: str, lacking: list[str]) -> None:
    code, said = ndif(kernel, "doctor")
    assert code == 1
    for name in lacking:
        assert row(said, name)[1:3] == ["no", "yes"]
    assert "Untrusted code is refused on this machine" in said
    assert "NDIF_SANDBOX=best-effort" in said

    code, said = ndif(kernel, "doctor", "--json")
    assert code == 1
    answer = json.loads(said)
    assert answer["safe"] is False
    assert [
        layer["name"] for layer in answer["layers"] if layer["required"] and not layer["present"]
    ] == lacking


def test_it_advises_what_to_install(tmp_path: Path) -> None:
    environment = without_package(tmp_path, "pyseccomp", "RuntimeError('no libseccomp')")
    code, said = ndif("", "doctor", environment=environment)
    assert code == 1
    assert "apt install libseccomp2" in row(said, SECCOMP)[3]


def test_its_help_lists_it() -> None:
    code, said = ndif("", "--help")
    assert code == 0
    assert re.search(r"^  doctor +Show which sandbox layers", said, re.MULTILINE)


# A server for untrusted users.


@pytest.mark.parametrize("kernel", ["landlock", "seccomp"])
def test_a_sandboxed_server_is_refused_before_it_loads(
    kernel: str, tiny_gpt2: Path, tmp_path: Path
) -> None:
    code, said = ndif(
        kernel, "local", "start", tiny_gpt2, "--name", "a/b", "--sandbox",
        environment={"NDIF_SESSION_ROOT": str(tmp_path)},
    )  # fmt: skip
    assert code == 1
    assert re.search(rf"^Error: {REFUSAL}", said, re.MULTILINE), said
    assert "NDIF_SANDBOX=best-effort" in said
    assert "Loading" not in said
    assert "Loaded" not in said


def test_a_trusting_server_needs_no_layers(tmp_path: Path) -> None:
    code, said = ndif("landlock+seccomp", "local", "start", "./nothing-is-here")
    assert code == 1
    assert "There is no folder" in said


def test_a_server_starts_with_best_effort(tiny_gpt2: Path, tmp_path: Path) -> None:
    server = subprocess.Popen(
        without("landlock", NDIF, "local", "start", tiny_gpt2, "--name", "a/b", "--sandbox"),
        env={
            **os.environ,
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "NDIF_SANDBOX": "best-effort",
            "NDIF_SESSION_ROOT": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    try:
        assert server.stdout is not None
        for line in server.stdout:
            said.append(line)
            if "Serving at" in line:
                break
        assert any("Serving at" in line for line in said), "".join(said)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
