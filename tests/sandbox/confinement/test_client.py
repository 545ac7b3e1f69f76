"""The confinement of a client: its remaining rights, and the limits of a result that it unpickles."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

TRIES = """
import json, os, pathlib, pickle, socket, subprocess, sys, tempfile
from ndif.sandbox.confinement.client import confine_client

port, folder, secret, made, certificate = int(sys.argv[1]), *map(pathlib.Path, sys.argv[2:])
confine_client(folder, [certificate])

def tried(what):
    try:
        what()
    except OSError as error:
        return type(error).__name__
    return "done"

class Reads:
    def __reduce__(self):
        return open, (str(secret),)

with tempfile.TemporaryFile() as file:
    temporary = file.write(b"1") == 1
import decimal, sqlite3  # modules that are loaded late
print(json.dumps({
    "cache": tried(lambda: (folder / "config.json").write_text("{}")),
    "temporary": temporary,
    "certificate": tried(certificate.read_text),
    "connect": tried(lambda: socket.create_connection(("127.0.0.1", port)).close()),
    "secret": tried(lambda: pickle.loads(pickle.dumps(Reads()))),
    "parent": tried(lambda: open(f"/proc/{os.getppid()}/environ").read()),
    "write": tried(lambda: made.write_text("1")),
    "run": tried(lambda: subprocess.run(["/bin/true"])),
}))
"""


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """The client's folder, an unreadable file, a file that it must not create, and a readable file."""
    (tmp_path / "cache").mkdir()
    for name in ("secret", "certificate"):
        (tmp_path / name).write_text(name)
    return [str(tmp_path / name) for name in ("cache", "secret", "made", "certificate")]


def test_confined_client_reaches_server_but_no_other_files(places: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        process = subprocess.run(
            [sys.executable, "-c", TRIES, port, *places],
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
        )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {
        "cache": "done",
        "temporary": True,
        "certificate": "done",
        "connect": "done",
        **dict.fromkeys(("secret", "parent", "write", "run"), "PermissionError"),
    }
