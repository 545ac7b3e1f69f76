"""`ndif cache` on a machine with a server, and without one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from tests.clients.harness import StartedServer
from tests.commands import ndif
from tests.conftest import ADAPTER, NAME, WIDE
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]


class Here:
    """This machine, with three repositories in its Hugging Face cache."""

    def __init__(self, root: Path, environment: dict[str, str], hub_url: str) -> None:
        self.environment = {
            **environment,
            "HF_HOME": str(root / "home"),
            "NDIF_SESSION_ROOT": str(root / "sessions"),
            "NDIF_DATABASE_URL": f"sqlite:///{root / 'keys.sqlite'}",
            "NDIF_SCHEDULE": str(root / "calendar.ics"),
        }
        for name in (NAME, WIDE, ADAPTER):
            snapshot_download(name, endpoint=hub_url, cache_dir=root / "home" / "hub")

    def ndif(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command, run to its end."""
        variables = {**os.environ, "COLUMNS": "200", **self.environment, **variables}
        return ndif(*arguments, environment=variables)

    def listed(self, **variables: str) -> dict[str, Any]:
        """Return the answer of `ndif cache list`."""
        result = self.ndif("cache", "list", "--json", **variables)
        assert result.returncode == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def states(self) -> dict[str, str | None]:
        """Return the state of each repository in the cache."""
        return {row["name"]: row["state"] for row in self.listed()["repositories"]}


@pytest.fixture
def here(tmp_path: Path, server_environment: dict[str, str], hub_url: str) -> Here:
    begins = datetime.now(timezone.utc) + timedelta(days=10)
    event = f"UID:1\nSUMMARY:{ADAPTER}\nDTSTART:{begins:%Y%m%dT%H%M%SZ}\nDURATION:PT1H"
    head = "BEGIN:VCALENDAR\nVERSION:2.0\nPRODID:-//a//b//EN\nBEGIN:VEVENT"
    lines = f"{head}\n{event}\nDTSTAMP:20260101T000000Z\nEND:VEVENT\nEND:VCALENDAR\n"
    (tmp_path / "calendar.ics").write_text(lines.replace("\n", "\r\n"))
    return Here(tmp_path, server_environment, hub_url)


@pytest.fixture
def server(here: Here) -> Iterator[StartedServer]:
    started = StartedServer(NAME, environment=here.environment)
    try:
        yield started.ready()
    finally:
        started.stop()


def test_deployed_and_booked_models_stay_in_cache(here: Here, server: StartedServer) -> None:
    until(lambda: b'"RUNNING"' in server.get("/status")[1])
    until(lambda: here.states() == {NAME: "deployed", WIDE: None, ADAPTER: "booked"})
    shown = here.ndif("cache", "list")
    assert f"{here.environment['HF_HOME']}/hub: " in shown.stdout.replace("\n", "")
    assert "no limit" in shown.stdout
    for name, state in ((NAME, "deployed"), (ADAPTER, "booked")):
        result = here.ndif("cache", "rm", name.upper())
        assert result.returncode == 5
        assert result.stderr.endswith(f"Error: {name!r} stays in the cache: it is {state}.\n")
    tried = json.loads(here.ndif("cache", "prune", "--to", "0B", "--dry-run", "--json").stdout)
    assert (tried["deleted"], tried["dry_run"]) == ([WIDE], True)
    assert len(here.states()) == 3
    pruned = here.ndif("cache", "prune", "--to", "0B")
    assert pruned.stdout.startswith(f"Deleted {WIDE} (")
    assert pruned.stdout.endswith("All remaining models are deployed, booked or in use.\n")
    assert {*here.states()} == {NAME, ADAPTER}
    # The evicted model is unprotected and can be removed.
    assert here.ndif("evict", NAME, "--cold").returncode == 0
    until(lambda: here.states()[NAME] is None)
    assert here.ndif("cache", "rm", NAME).returncode == 0
    assert {*here.states()} == {ADAPTER}
    assert here.ndif("cache", "rm", NAME).returncode == 4


def test_load_frees_cache_or_is_rejected(here: Here) -> None:
    sizes = {row["name"]: row["size_bytes"] for row in here.listed()["repositories"]}
    assert here.ndif("cache", "rm", WIDE).returncode == 0
    # One repository must be removed: the adapter is neither deployed nor booked.
    limit = str(sizes[NAME] + sizes[ADAPTER] + sizes[WIDE] - 1)
    environment = {**here.environment, "NDIF_CACHE_BYTES": limit, "NDIF_SCHEDULE": ""}
    os.utime(next(Path(environment["HF_HOME"]).glob(f"hub/*{ADAPTER[-4:]}/blobs")).parent)
    server = StartedServer(NAME, environment=environment)
    try:
        server.ready()
        until(lambda: b'"RUNNING"' in server.get("/status")[1])
        assert here.ndif("deploy", WIDE).returncode == 0
        assert {*here.states()} == {NAME, WIDE}
        assert any(
            f"deleted to make room for {WIDE}: {ADAPTER}" in printed for printed in server.output
        )
        refused = here.ndif("deploy", ADAPTER)
        assert refused.returncode == 1
        assert here.ndif("evict", WIDE, "--cold").returncode == 0
    finally:
        server.stop()


def test_cache_commands_work_without_server(here: Here) -> None:
    assert here.states() == {NAME: None, WIDE: None, ADAPTER: None}
    answer = here.listed(NDIF_CACHE_BYTES="50%")
    assert answer["limit_bytes"] > 0
    assert answer["total_bytes"] == sum(row["size_bytes"] for row in answer["repositories"])
    for arguments, why in (
        (("prune",), "Give --to SIZE, or set NDIF_CACHE_BYTES."),
        (("prune", "--to", "5x"), "Invalid value for --to: must be a size"),
    ):
        result = here.ndif("cache", *arguments)
        assert result.returncode == 2
        assert why in result.stderr
    assert here.ndif("cache", "prune", NDIF_CACHE_BYTES="1B").returncode == 0
    assert here.states() == {}
