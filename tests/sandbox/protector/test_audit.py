"""The audit hook: in a process that runs a user's code, Python opens only permitted files."""

# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndif.sandbox.protector.audit import PermittedPaths, refuse_effects

pytestmark = pytest.mark.process


def in_a_fork(permitted: PermittedPaths, calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the outcome of each call in a separate process, since audit hooks cannot be removed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            refuse_effects(permitted)
            outcomes = {}
            for name, call in calls.items():
                try:
                    call()
                    outcomes[name] = "done"
                except OSError as error:
                    outcomes[name] = type(error).__name__
            os.write(writing, json.dumps(outcomes).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    answers: dict[str, str] = json.loads(text)
    return answers


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A readable folder with a link that leads out of it, and a forbidden folder."""
    given, other = tmp_path / "given", tmp_path / "given-not"
    for folder in (given, other):
        folder.mkdir()
        (folder / "notes").write_text("content")
    (given / "link").symlink_to(other / "notes")
    return given, other


class Path_(str):  # noqa: N801
    """A string that always claims to be below the readable folder."""

    def startswith(self, *_: object) -> bool:
        return True

    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = str.__hash__


def test_only_permitted_files_are_opened(folders: tuple[Path, Path]) -> None:
    given, other = folders
    kept = os.open(other / "notes", os.O_RDONLY)
    calls: dict[str, Callable[[], Any]] = {
        "a file": (given / "notes").read_text,
        "its bytes": lambda: open(os.fsencode(given / "notes")).close(),
        "a folder": lambda: os.listdir(given),
        "a descriptor": lambda: os.fdopen(os.dup(kept)).close(),
        "nothing": lambda: open(os.devnull, "w").close(),
        "another file": (other / "notes").read_text,
        "another's bytes": lambda: open(os.fsencode(other / "notes")).close(),
        "another folder": lambda: os.listdir(other),
        "another by scandir": lambda: os.scandir(other),
        "another by number": lambda: os.open(other / "notes", os.O_RDONLY),
        "the way up": (given / ".." / "given-not" / "notes").read_text,
        "a link": (given / "link").read_text,
        "a lie": lambda: open(Path_(other / "notes")).close(),
        "to write": lambda: (given / "notes").write_text("changed"),
        "to append": lambda: open(given / "notes", "a").close(),
        "to make": lambda: (given / "new").touch(),
        "to remove": (given / "notes").unlink,
        "to rename": lambda: (given / "notes").rename(given / "new"),
    }
    permitted = PermittedPaths.of([given], [Path(os.devnull)])
    outcomes = in_a_fork(permitted, calls)
    may = {"a file", "its bytes", "a folder", "a descriptor", "nothing"}
    assert outcomes == {name: "done" if name in may else "PermissionError" for name in calls}
    os.close(kept)


def test_programs_signals_and_connections_are_refused(folders: tuple[Path, Path]) -> None:
    def connect() -> None:
        with socket.socket() as client:
            client.connect(("127.0.0.1", 1))

    calls: dict[str, Callable[[], Any]] = {
        "a program": lambda: subprocess.run(["/bin/true"]),
        "a shell": lambda: os.system("true"),
        "a fork": lambda: os._exit(0) if os.fork() == 0 else None,
        "a program in its place": lambda: os.execv("/bin/true", ["true"]),
        "a signal": lambda: os.kill(os.getpid(), 0),
        "a connection": connect,
        "a name": lambda: socket.getaddrinfo("localhost", 80),
    }
    outcomes = in_a_fork(PermittedPaths.of([folders[0]], []), calls)
    assert outcomes == dict.fromkeys(calls, "PermissionError")
