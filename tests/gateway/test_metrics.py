"""`GET /metrics`: access, and the metrics of a server that has run jobs of both wires."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from ndif.config.settings import Settings
from ndif.control.operations import GetStatus, Operation
from ndif.gateway import metrics
from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.metrics import MetricsRoute
from ndif.schema.deployment import OperationError
from ndif.server.gateway_process import create
from ndif.server.process_config import ProcessConfig
from ndif.stores.accounts import AccountsUnavailableError
from ndif.stores.objects import ObjectStoreError
from tests.clients.harness import LocalServer
from tests.gateway.test_bad_input import send_old
from tests.on_loop import on_loop
from tests.security.serving import NAME, OLD, gateway
from tests.services.prometheus import PrometheusServer
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SECRET
from tests.telemetry.test_metrics import STATE
from tests.waiting import PATIENCE_S, eventually, until

pytestmark = pytest.mark.engine

TOKEN = "the operator's"


class Leader:
    """A stand-in for the leader and for a store."""

    def __init__(self) -> None:
        self.asked = 0
        self.leads = True
        self.problem: Exception | None = None

    async def ping(self) -> None:
        if self.problem is not None:
            raise self.problem

    def route(self, networks: Sequence[str], token: str | None = TOKEN) -> MetricsRoute:
        allowed = [ip_network(network) for network in networks]
        return MetricsRoute(self.perform, {"objects": self.ping}, Path("/"), allowed, token)

    async def perform(self, operation: Operation) -> Any:
        assert isinstance(operation, GetStatus)
        self.asked += 1
        if not self.leads:
            raise OperationError(503, "No process of this server leads at the moment.")
        return STATE


async def answer(
    leader: Leader, address: str, networks: Sequence[str] = (), **headers: str
) -> httpx.Response:
    routes = leader.route(networks).routes()
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    transport = httpx.ASGITransport(app, client=(address, 123))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        return await http.get("/metrics", headers=headers)


@on_loop
async def test_metrics_need_allowed_network_or_token() -> None:
    leader = Leader()
    right, wrong = f"Bearer {TOKEN}", "Bearer another"
    for address, networks, headers, status in (
        ("10.20.0.7", [], {}, 403),
        ("10.20.0.7", ["10.30.0.0/16"], {}, 403),
        ("10.20.0.7", ["10.20.0.0/16", "fd12::/32"], {}, 200),
        ("fd12::5", ["10.20.0.0/16", "fd12::/32"], {}, 200),
        ("10.20.0.7", [], {"Authorization": right}, 200),
        ("10.20.0.7", ["10.20.0.0/16"], {"Authorization": wrong}, 403),
        ("not an address", ["10.20.0.0/16"], {}, 403),
        # A proxy on this machine forwards a request of unknown origin.
        ("127.0.0.1", [], {"X-Forwarded-For": "8.8.8.8"}, 403),
    ):
        response = await answer(leader, address, networks, **headers)
        assert response.status_code == status, (address, networks, headers)
        if status == 403:
            assert "NDIF_METRICS_ALLOW" in response.json()["detail"]


@on_loop
async def test_metrics_report_missing_leader() -> None:
    leader = Leader()
    leader.leads = False
    response = await answer(leader, "10.20.0.7", ["10.0.0.0/8"])
    assert response.status_code == 200
    assert "\nndif_leader_up 0.0\n" in response.text
    assert "ndif_queue_depth" not in response.text


@pytest.mark.parametrize(
    "problem",
    [ObjectStoreError("it is away"), asyncio.TimeoutError(), AccountsUnavailableError("gone")],
)
@on_loop
async def test_metrics_report_unavailable_store(problem: Exception) -> None:
    leader = Leader()
    response = await answer(leader, "10.20.0.7", ["10.0.0.0/8"])
    assert '\nndif_store_up{store="objects"} 1.0\n' in response.text
    leader.problem = problem
    response = await answer(leader, "10.20.0.7", ["10.0.0.0/8"])
    assert response.status_code == 200
    assert '\nndif_store_up{store="objects"} 0.0\n' in response.text
    assert '\nndif_disk_bytes{kind="free"} ' in response.text


@on_loop
async def test_metrics_report_unavailable_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_STATE_S", 0.0)  # no caching
    monkeypatch.setattr(metrics, "_PATIENCE_S", 0.5)
    with RedisServer(tmp_path) as redis:
        settings = Settings(broker_url=redis.url, dev_mode=True, metrics_allow="10.0.0.0/8")
        config = ProcessConfig(0, tmp_path, "s", "a token", "here", [], cluster_secrets=[SECRET])
        transport = httpx.ASGITransport(create(settings, config).app, client=("10.0.0.1", 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:

            async def up() -> list[str]:
                response = await http.get("/metrics")
                assert response.status_code == 200, response.text
                return re.findall(
                    r'^ndif_store_up{store="(\w+)"} 1\.0$', response.text, re.MULTILINE
                )

            async def all_are_up() -> bool:
                return await up() == ["broker", "objects", "accounts"]

            async def broker_is_away() -> bool:
                return await up() == ["objects", "accounts"]

            await eventually(all_are_up)
            redis.pause()
            await eventually(broker_is_away)
            redis.resume()
            redis.stop()
            await eventually(broker_is_away)
            redis.start()
            await eventually(all_are_up)


@on_loop
async def test_leader_state_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_STATE_S", PATIENCE_S)
    leader = Leader()
    app = Starlette(routes=leader.route(["10.0.0.0/8"], None).routes())
    transport = httpx.ASGITransport(app, client=("10.0.0.1", 123))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        for _ in range(10):
            assert (await http.get("/metrics")).status_code == 200
    assert leader.asked == 1


def test_rejections_and_requests_are_counted(runtimes: Path, tmp_path: Path) -> None:
    with gateway(tmp_path / "results", runtimes, dev_mode=True) as server:

        def count(name: str, **labels: Any) -> float:
            pairs = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
            text = httpx.get(f"{server.url}/metrics").text
            lines = [line for line in text.splitlines() if line.startswith(f"{name}{{{pairs}}} ")]
            return float(lines[0].split()[-1]) if lines else 0.0

        refused = {"name": "ndif_refusals_total", "reason": "invalid"}
        answered = {"method": "POST", "route": "/request", "status": "400"}
        before = count(**refused), count("ndif_http_requests_total", **answered)
        assert httpx.post(f"{server.url}/request", content=b"?").status_code == 400
        after = count(**refused), count("ndif_http_requests_total", **answered)
        assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]
        accepted = count("ndif_submitted_bytes_count", wire="headers")
        assert server.submit_old().status_code == 200
        assert count("ndif_submitted_bytes_count", wire="headers") == accepted + 1


def test_no_value_that_a_client_chooses_adds_series(runtimes: Path, tmp_path: Path) -> None:
    with gateway(tmp_path / "results", runtimes, dev_mode=True) as server:

        def series() -> set[str]:
            lines = httpx.get(f"{server.url}/metrics").text.splitlines()
            return {line.rpartition(" ")[0] for line in lines if line.startswith("ndif_")}

        def send(text: str) -> None:
            http.get(f"/{text}")
            http.get(f"/response/{text}/{text}")
            http.get("/ping", headers={"User-Agent": text, "Origin": f"http://{text}"})
            versions = {"nnsight-version": text, "python-version": text}
            assert server.submit_old(**versions).status_code == 400
            key = OLD.replace(NAME, f"{text}/model")
            assert server.submit_old(**{"nnsight-model-key": key}).status_code == 400

        with httpx.Client(base_url=server.url) as http:
            series()
            send("first")
            before = series()
            for number in range(20):
                send(f"invented-{number}")
            assert series() == before


@pytest.mark.parametrize(
    ("query", "least"),
    [
        ('ndif_jobs_total{status="ERROR"}', 1),
        ("sum(ndif_job_wait_seconds_count)", 1),
        ('ndif_job_status_seconds_count{status="RECEIVED"}', 1),
        ("ndif_model_load_seconds_count", 1),
        ('ndif_replicas{state="RUNNING"}', 1),
        ("ndif_leader_up", 1),
        ("sum(ndif_http_request_seconds_count)", 1),
        ("ndif_cpu_memory_bytes", 1),
    ],
)
def test_real_prometheus_reads_metrics(
    server: LocalServer, prometheus: PrometheusServer, query: str, least: float
) -> None:
    (sample, *_) = prometheus.until(query)
    assert float(sample["value"][1]) >= least


@pytest.fixture(scope="module")
def prometheus(server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Prometheus that scrapes a server which has run a job."""
    job = send_old(server).json()["id"]
    until(lambda: httpx.get(f"{server.url}/response/{job}").json()["status"] == "ERROR")
    folder = tmp_path_factory.mktemp("prometheus")
    with PrometheusServer(folder, server.url.removeprefix("http://")) as monitor:
        yield monitor
