"""The server's own probes: status, metrics and clients report a model whose weights change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import client_environment
from tests.probe.test_cli import NAME, Operated, until_no_client
from tests.services.redis import RedisServer
from tests.tiny_models import make_gpt2
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHOWS_STATUS = """
from nnsight import ndif
found = ndif.status()
print(found.status.value, found, ndif.status(raw=True))
"""


class Probed(Operated):
    """A server that probes itself."""

    def __init__(self, environment: dict[str, str], model: Path) -> None:
        settings = {"NDIF_PROBE_INTERVAL_S": "1", "NDIF_PROBE_TIMEOUT_S": "5m"}
        super().__init__({**environment, **settings}, f"{NAME}={model}")

    def public(self) -> dict[str, Any]:
        """Return the public outcome of the probes; empty before the first."""
        (entry,) = json.loads(self.server.get("/status")[1])["deployments"].values()
        facts: dict[str, Any] = entry.get("probes", {}).get("0.8", {})
        return facts

    def until_outcome(self, outcome: str) -> dict[str, Any]:
        """Wait for the outcome of a probe."""
        facts: dict[str, Any] = until(
            lambda: (facts := self.public()).get("outcome") == outcome and facts,
            lambda: json.dumps(self.public()),
        )
        return facts

    def metric(self, name: str, **labels: str) -> float | None:
        """Return a sample of the model; None if there is none."""
        expected = {"model": NAME, "generation": "0.8", **labels}
        text = httpx.get(f"{self.server.url}/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == expected:
                    return float(sample.value)
        return None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_gpt2(tmp_path / "model")


@pytest.fixture
def probed(server_environment: dict[str, str], model: Path, tmp_path: Path) -> Iterator[Probed]:
    """A server of one process whose users need keys."""
    environment = {
        **server_environment,
        "NDIF_SESSION_ROOT": str(tmp_path / "sessions"),
        "NDIF_DATABASE_URL": f"sqlite:///{tmp_path / 'keys.sqlite'}",
    }
    probed = Probed(environment, model)
    yield probed
    probed.server.stop()
    until_no_client(server_environment)


def test_server_publishes_probe_outcomes_of_its_models(
    probed: Probed, model: Path, runtimes: Path, tmp_path: Path
) -> None:
    facts = probed.until_outcome("ok")
    assert (facts["up"], facts["up_share"]) == (True, 1.0)
    assert facts["probes"] >= 1
    assert facts["seconds"] > 0
    assert probed.metric("ndif_probe_up") == 1
    assert (probed.metric("ndif_probe_seconds_count") or 0) >= 1
    assert (probed.metric("ndif_probes_total", outcome="ok") or 0) >= 1
    # No user's usage contains the probe's job, and older clients ignore the field.
    assert json.loads(probed.ndif("usage", "--json").stdout)["usage"] == []
    for overlay in (None, runtimes / "0.7"):
        environment = client_environment(probed.server, tmp_path / "home", overlay)
        process = subprocess.run(
            [sys.executable, "-c", SHOWS_STATUS],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        assert process.stdout.startswith("UP ")
        assert NAME in process.stdout
        assert "'probes': {'0.8'" in process.stdout
    # Other weights under the same name, after a restart.
    make_gpt2(model, seed=1)
    process = probed.ndif("restart", NAME)
    assert process.returncode == 0, process
    facts = probed.until_outcome("wrong")
    assert facts["up"] is False
    assert 0 < facts["up_share"] < 1
    assert probed.metric("ndif_probe_up") == 0
    shown = json.loads(probed.ndif("status", "--json").stdout)
    (row,) = shown["models"]
    assert "differs from the first probe" in row["probe"]["reason"]
    assert f"The last probe of {NAME} by nnsight 0.8" in probed.ndif("status").stdout
    # After an eviction, another model may have this name.
    assert probed.ndif("evict", NAME).returncode == 0
    probed.deploy(model, "0.8")
    assert probed.until_outcome("ok")["up"] is True


def test_leader_probes_through_gateways(
    server_environment: dict[str, str], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as redis:
        environment = {
            **server_environment,
            "NDIF_SESSION_ROOT": str(tmp_path / "sessions"),
            "NDIF_BROKER_URL": redis.url,
            "NDIF_CLUSTER_SECRET": "a secret of this test",
        }
        probed = Probed(environment, model)
        try:
            assert probed.until_outcome("ok")["up"] is True
        finally:
            probed.server.stop()
    until_no_client(server_environment)
