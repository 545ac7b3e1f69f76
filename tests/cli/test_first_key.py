"""`ndif start` without configuration: it creates a key database and a first key for its user."""

from __future__ import annotations

import os
import pty
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_start import FAILS, Place, a_place, free_port
from tests.commands import NDIF

pytestmark = [pytest.mark.process, pytest.mark.slow]

NOTHING = {"NDIF_DEV_MODE": "false"}
"""Variables that configure no accounts."""


@pytest.fixture
def place(server_environment: dict[str, str], tmp_path: Path) -> Iterator[Place]:
    yield from a_place(server_environment, tmp_path / "sessions")


def key_in(file: Path, url: str) -> str:
    """Return the key in `client.env`."""
    match = re.fullmatch(
        rf"export NDIF_HOST={re.escape(url)}\nexport NDIF_API_KEY=(ndif_\S{{43}})\n",
        file.read_text(),
    )
    assert match, file.read_text()
    return match[1]


def holders(root: Path, key: str) -> set[str]:
    """Return the names of the files that hold a key."""
    files = (file for file in root.rglob("*") if file.is_file() and not file.is_symlink())
    return {file.name for file in files if key.encode() in file.read_bytes()}


def whoami(url: str, key: str) -> Any:
    return httpx.get(f"{url}/whoami", headers={"ndif-api-key": key}, verify=False).json()


def test_first_start_creates_key_that_later_starts_keep(place: Place) -> None:
    info = place.start("--port", free_port(), **NOTHING)
    file = place.root / "client.env"
    assert info["client_file"] == str(file)
    assert file.stat().st_mode & 0o777 == 0o600
    key = key_in(file, info["url"])
    assert key not in str(info)
    me = {"email": pwd.getpwuid(os.geteuid()).pw_name, "tags": ["hotswapping", "gated"]}
    assert whoami(info["url"], key) == me
    headers = {"nnsight-version": "0.8.1"}
    refused = httpx.post(f"{info['url']}/request", headers=headers, verify=False)
    assert (refused.status_code, "API key" in refused.json()["detail"]) == (401, True)
    assert place.ndif("stop").code == 0
    # No log and no other file holds the key.
    assert holders(place.root, key) == {"client.env"}
    again = place.start("--port", free_port(), **NOTHING)
    assert key_in(file, again["url"]) == key
    assert whoami(again["url"], key) == me
    assert len(place.read("keys", "list")["keys"]) == 1
    assert (place.root / "accounts.sqlite").stat().st_mode & 0o777 == 0o600


def test_first_key_is_shown_only_on_terminal(place: Place) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.run(
        [NDIF, "start", "--detach", "--port", free_port()],
        env={**os.environ, **place.environment, **NOTHING, "COLUMNS": "300"},
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    shown = os.read(ours, 65536).decode()
    assert process.returncode == 0, process.stderr
    match = re.search(r"export NDIF_API_KEY=(\S+)", shown)
    assert match, shown
    key = match[1]
    assert f"export NDIF_API_KEY={key}\n" in (place.root / "client.env").read_text()
    assert key not in process.stderr
    assert place.ndif("stop").code == 0
    # Without a terminal, the output names only the file.
    again = place.ndif("start", "--detach", "--port", free_port(), **NOTHING)
    assert f". {place.root / 'client.env'} " in again.output
    assert key not in again.output + again.error


def test_failed_start_keeps_key_for_next_start(place: Place) -> None:
    environment = {**os.environ, **place.environment, **NOTHING}
    failed = subprocess.run([sys.executable, "-c", FAILS], env=environment, capture_output=True)
    assert failed.returncode == 1
    lines = place.root / "client.env"
    key = lines.read_text().partition("NDIF_API_KEY=")[2].strip()
    assert key.encode() not in failed.stdout + failed.stderr
    info = place.start("--port", free_port(), **NOTHING)
    assert key_in(lines, info["url"]) == key
    assert whoami(info["url"], key)["tags"] == ["hotswapping", "gated"]


def test_named_database_gets_no_first_key(place: Place, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/named.sqlite"
    info = place.start("--port", free_port(), NDIF_DATABASE_URL=url)
    assert info["client_file"] is None
    assert not (place.root / "client.env").exists()
    new_key = place.read("keys", "create", "--user", "ada")
    assert whoami(info["url"], new_key["api_key"])["email"] == "ada"
    assert place.ndif("keys", "revoke", new_key["id"][:6]).code == 0


def test_open_access_beyond_loopback_needs_insecure_option(place: Place) -> None:
    refused = place.ndif("start", "--host", "0.0.0.0", "--port", free_port())
    assert refused.code == 1
    assert "admits everybody who reaches 0.0.0.0" in refused.error
    assert "--insecure" in refused.error
    place.start("--host", "0.0.0.0", "--insecure", "--port", free_port())
    assert place.ndif("restart").code == 0  # with the same options
    assert place.ndif("stop").code == 0
    # A server with keys needs no `--insecure`.
    place.start("--host", "0.0.0.0", "--port", free_port(), **NOTHING)
