"""A real Prometheus answers each query of the dashboards and alerts, about a real server that was in use.

`python -m pytest -s tests/telemetry/test_dashboards.py` prints the queries, and how many series each has.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from tests.clients.harness import NDIF, Client, StartedServer, children, model_processes, until
from tests.clients.test_many import ONE_FITS
from tests.gateway.test_bad_input import OLD, key, send_old
from tests.services.prometheus import PrometheusServer
from tests.services.redis import RedisServer
from tests.serving import serving
from tests.telemetry.operating import PROMETHEUS, Query, alert_queries, dashboard_queries
from tests.tiny_models import make_gpt2, make_llama

BROKEN = "tests/broken"
GPT2, LLAMA = "tests/gpt2", "tests/llama"


@dataclass(frozen=True)
class Site:
    """A server with a broker, whose models take turns on one GPU, and a Prometheus that scrapes it."""

    server: StartedServer
    redis: RedisServer
    prometheus: PrometheusServer

    def garbage(self, repo_id: str = GPT2, callback: str = "") -> httpx.Response:
        """Send a job that cannot be run."""
        name = key(repo_id, path=OLD, task=None)
        return send_old(self.server, nnsight_model_key=name, ndif_callback=callback)

    def probes(self) -> float:
        """Return how many probes got a value."""
        lines = httpx.get(f"{self.server.url}/metrics").text.splitlines()
        counts = (line.split() for line in lines if line.startswith("ndif_probe_seconds_count{"))
        return sum(float(count) for _, count in counts)

    def model_processes(self) -> list[int]:
        """Return the processes that hold models, which the process that leads has started."""
        found = map(model_processes, children(self.server.process.pid))
        return [*itertools.chain.from_iterable(found)]

    def end_of(self, job: str) -> str:
        """Return the status with which a job has ended."""

        def ended() -> str | None:
            status: str = httpx.get(f"{self.server.url}/response/{job}").json()["status"]
            return status if status in ("COMPLETED", "ERROR") else None

        status: str = until(ended)
        return status


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models, and one whose tokenizer nobody can read."""
    folder = tmp_path_factory.mktemp("shown")
    found = {
        GPT2: make_gpt2(folder / "gpt2"),
        LLAMA: make_llama(folder / "llama"),
        BROKEN: make_gpt2(folder / "broken"),
    }
    (found[BROKEN] / "tokenizer.json").write_text("{")
    return found


@pytest.fixture(scope="module")
def site(
    models: dict[str, Path], runtimes: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A server that is in use, and has lived through what goes wrong."""
    folder = tmp_path_factory.mktemp("site")
    hub = HfMirror(share_weights=True)
    for name, files in models.items():
        hub.serve(MirroredModel(name, files, None, "text-generation"))
    with (
        serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as hub_url,
        RedisServer(tmp_path_factory.mktemp("redis")) as redis,
    ):
        server = StartedServer(
            environment={
                "HF_ENDPOINT": f"{hub_url}/hub",
                "HF_HOME": str(folder / "hf"),
                "NDIF_RUNTIMES_DIR": str(runtimes),
                "NDIF_SESSION_ROOT": str(folder / "sessions"),
                "NDIF_BROKER_URL": redis.url,
                "NDIF_CLUSTER_SECRET": "a secret of this test",
                "NDIF_NODE_GPUS": ONE_FITS,
                "NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS": "0",
                "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
                "NDIF_CALLBACK_NETWORKS": "127.0.0.0/8",
                "NDIF_CALLBACK_ATTEMPTS": "1",
                "NDIF_PROBE_INTERVAL_S": "2",
                "NDIF_PROBE_TIMEOUT_S": "5m",
            }
        )
        clients = []
        try:
            server.ready()
            rules = [PROMETHEUS / "alerts.yml"]
            target = server.url.removeprefix("http://")
            with PrometheusServer(folder, target, rules=rules) as prometheus:
                found = Site(server, redis, prometheus)
                for name in (GPT2, LLAMA):
                    environment = {
                        "NDIF_HOST": server.url,
                        "HF_ENDPOINT": f"{hub_url}/hub",
                        "HF_HOME": str(folder / f"client-{len(clients)}"),
                        "NDIF_API_KEY": "",
                    }
                    clients.append(Client("scenarios_many", name, models[name], environment))
                use(found, clients)
                yield found
        finally:
            for client in clients:
                client.close()
            server.stop()


def use(site: Site, clients: list[Client]) -> None:
    """Do with a server what its metrics tell of."""
    for _ in range(3):
        for client in clients:  # each displaces the other's model
            client.run("scenario_a_trace")
    # A job that fails, of which nobody can be told; one that is refused; a model that does not load.
    job = site.garbage(callback="http://127.0.0.1:9/").json()["id"]
    assert site.end_of(job) == "ERROR"
    assert httpx.post(f"{site.server.url}/request", content=b"?").status_code == 400
    assert site.end_of(site.garbage(BROKEN).json()["id"]) == "ERROR"
    # A broker that is away for a moment.
    site.redis.pause()
    try:
        assert site.garbage().status_code == 503
        time.sleep(3)  # until Prometheus has seen it
    finally:
        site.redis.resume()
    until(lambda: site.garbage().status_code == 200)
    # A process that ends by itself.
    killed = site.model_processes()
    assert killed
    for process in killed:
        os.kill(process, signal.SIGKILL)
    for client in clients:
        client.run("scenario_a_trace")
    # A model that the server is to serve, and probes; two of its probes make a rate.
    done = subprocess.run(
        [NDIF, "deploy", GPT2, "--dedicated"],
        env={**os.environ, **site.server.environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done
    for _ in range(2):
        seen = site.probes()
        until(partial(lambda seen: site.probes() > seen, seen))
        time.sleep(3)  # until Prometheus has seen it


def answer(prometheus: PrometheusServer, query: Query) -> tuple[int, int]:
    """Return the number of series that a query answers with, and of those whose value is a number."""
    found = prometheus.query(query.text)
    return len(found), sum(not math.isnan(float(one["value"][1])) for one in found)


def test_each_query_has_an_answer(site: Site) -> None:
    queries = [*dashboard_queries(), *alert_queries()]
    # What was counted last is scraped in a second, and a rate needs two of them.
    time.sleep(5)
    answers = {query: answer(site.prometheus, query) for query in queries}
    for query, (series, numbers) in answers.items():
        print(f"{series:3} {numbers:3}  {query.place:50} {query.text}")
    assert not [query.place for query, (_, numbers) in answers.items() if not numbers]


def test_prometheus_takes_every_rule(site: Site) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = site.prometheus.get("rules")["groups"]
        found: list[dict[str, Any]] = group["rules"]
        return found

    until(lambda: all(rule["health"] == "ok" for rule in rules()), lambda: str(rules()))
    assert len(rules()) == len(alert_queries())


def test_an_alert_tells_what_has_happened(site: Site) -> None:
    def summaries() -> dict[str, str]:
        found = site.prometheus.get("alerts")["alerts"]
        assert "<no value>" not in json.dumps(found)
        return {each["labels"]["alertname"]: each["annotations"]["summary"] for each in found}

    found = until(lambda: "NdifReplicasLost" in summaries() and summaries())
    assert "ended by itself" in found["NdifReplicasLost"]
    assert found["NdifLoadsFail"].startswith(BROKEN)
    assert "NdifTargetDown" not in found
