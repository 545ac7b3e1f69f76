"""`ndif healthz` before a service starts, while it runs and after it stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_start import Place, a_place
from tests.services.packages import need
from tests.services.process import free_port

pytestmark = pytest.mark.process


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield from a_place({}, tmp_path / "sessions")


def test_service_is_healthy_while_it_runs(place: Place) -> None:
    need("redis-server", "redis-server")
    broker = {"NDIF_BROKER_URL": f"redis://:secret@127.0.0.1:{free_port()}/0"}
    before = place.ndif("healthz")
    assert before.code == 1
    assert before.error == (
        f"Error: No server, worker or service of `ndif start` runs with the session root {place.root}.\n"
    )
    assert json.loads(place.ndif("healthz", "--json").output) == {"healthy": False, "checks": {}}

    assert place.ndif("start", "broker", "--detach", **broker).code == 0
    result = place.ndif("healthz", **broker)
    assert (result.code, result.output) == (0, "Healthy: broker.\n")
    assert place.ndif("stop", "--services", **broker).code == 0
    assert place.ndif("healthz", **broker).code == 1
