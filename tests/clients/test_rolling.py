"""A server of many machines: Redis, S3, two Ray nodes and two gateway hosts. Each fails in turn."""

from __future__ import annotations

import contextlib
import json
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.clients.harness import Client, StartedServer
from tests.clients.test_many import Many, Running, admin, hub, models
from tests.cluster.ray.rays import ray_cluster
from tests.services.process import HOST
from tests.services.ray import RayServer
from tests.services.redis import RedisServer
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer
from tests.waiting import PATIENCE_S, time_passes, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

__all__ = ["hub", "models"]

MODEL = "tests/gpt2"
KEY = 'nnsight.modeling.transformers.TransformersModel:{"repo_id": "tests/gpt2"}'


@dataclass
class Stack:
    """All services, hosts and clients."""

    redis: RedisServer
    s3: SwiftServer
    ray: RayServer
    hosts: list[StartedServer]
    many: Many

    def client(self, host: int = 0, generation: str = "0.8") -> Client:
        return self.many.client(self.hosts[host], MODEL, generation)

    @property
    def leader(self) -> psutil.Process:
        """The current leader."""
        for host in self.hosts:
            for process in parts(host, "ndif.server.leader"):
                if self.redis.command("get", "dispatcher:leader") and leads(process, host):
                    return process
        raise AssertionError("nobody leads")

    def is_running(self) -> bool:
        return all(b'"RUNNING"' in host.get("/status")[1] for host in self.hosts)


def parts(host: StartedServer, module: str) -> list[psutil.Process]:
    """Return the processes of a host that run a module."""
    return [
        process
        for process in psutil.Process(host.process.pid).children()
        if module in process.cmdline()
    ]


def leads(process: psutil.Process, host: StartedServer) -> bool:
    """Return True if it leads since it began; a driver of Ray has children that a standby has not."""
    return log(host).rpartition("Standing by")[2].count("Leading") > 0


def log(host: StartedServer) -> str:
    """Return the log of a host's dispatcher."""
    root = Path(host.environment["NDIF_SESSION_ROOT"])
    return (root / "current" / "logs" / "dispatcher" / "output.log").read_text()


def running(host: StartedServer) -> set[str]:
    """Return the generations with a running job."""
    return {row["generation"] for row in admin(host, "queue") if row["running"]}


def send(host: StartedServer) -> httpx.Response:
    """Send a job without a live channel; the job fails when it runs."""
    return httpx.post(
        f"{host.url}/request",
        data={"data": json.dumps({"model_key": KEY, "session_id": ""})},
        files={"blob": b"opaque"},
        headers={"nnsight-version": "0.8.1"},
        timeout=PATIENCE_S,
    )


def answer(host: StartedServer, job: str) -> dict[str, Any]:
    """Return the polled state of a job."""
    response: dict[str, Any] = httpx.get(f"{host.url}/response/{job}").json()
    return response


@pytest.fixture(scope="module")
def stack(
    hub: str,
    models: dict[str, Path],
    runtimes: Path,
    s3: SwiftServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("rolling")
    with contextlib.ExitStack() as all_of_it:
        redis = all_of_it.enter_context(RedisServer(tmp_path_factory.mktemp("redis")))
        environment = {
            "HF_ENDPOINT": hub,
            "HF_HOME": str(folder / "hf"),
            "NDIF_RUNTIMES_DIR": str(runtimes),
            "NDIF_SESSION_ROOT": str(folder / "nodes"),
            "NDIF_BROKER_URL": redis.url,
            "NDIF_OBJECT_STORE_URL": s3.url,
            "NDIF_OBJECT_STORE_ACCESS_KEY": ACCESS_KEY,
            "NDIF_OBJECT_STORE_SECRET_KEY": SECRET_KEY,
            "NDIF_OBJECT_STORE_BUCKET": f"rolling-{uuid.uuid4()}",
            "NDIF_RUNNER_POOL": "1",
        }
        # The Ray head keeps its state across restarts, as docs/cluster.md describes.
        memory = all_of_it.enter_context(RedisServer(tmp_path_factory.mktemp("head")))
        kept = {"RAY_REDIS_ADDRESS": f"{HOST}:{memory.port}"}
        ray = all_of_it.enter_context(ray_cluster(environment, "one", "two", head=kept))
        many = Many(hub, models, runtimes, folder)
        all_of_it.callback(many.close)
        settings = {name: value for name, value in environment.items() if "BROKER" in name}
        settings |= {name: value for name, value in environment.items() if "STORE" in name}
        settings |= {"NDIF_RAY_ADDRESS": ray.address, "NDIF_API_WORKERS": "2"}
        settings |= {"NDIF_CLUSTER_SECRET": "a secret that nodes are told"}
        # Two equal hosts; one setting differs so that `many` starts both.
        hosts = [many.server(MODEL, **settings, NDIF_LINE_PATIENCE=n) for n in ("31", "32")]
        whole = Stack(redis, s3, ray, hosts, many)
        until(whole.is_running)
        yield whole


@pytest.mark.parametrize("generation", ["0.8", "0.7"])
@pytest.mark.parametrize("host", [0, 1])
def test_either_host_serves_model_on_node(stack: Stack, host: int, generation: str) -> None:
    stack.client(host, generation).run("scenario_a_trace")


def test_broker_restart_loses_no_job(stack: Stack) -> None:
    stack.client().run("scenario_fifty_jobs_are_sent")
    stack.redis.stop()
    time_passes(1)
    stack.redis.start()
    stack.client().run("scenario_all_that_was_sent_is_answered")


def test_dead_gateway_is_replaced_without_failed_requests(stack: Stack) -> None:
    for _ in range(2):
        dying = parts(stack.hosts[0], "ndif.server.gateway_process")[0]
        dying.kill()
        dying.wait(PATIENCE_S)  # a dying gateway may still accept a connection
        stack.client().run("scenario_a_trace")
    until(lambda: len(parts(stack.hosts[0], "ndif.server.gateway_process")) == 2)


def test_standby_takes_over_when_leader_dies(stack: Stack) -> None:
    stack.client().run("scenario_fifty_jobs_are_sent")
    before = stack.leader
    before.kill()
    stack.client().run("scenario_all_that_was_sent_is_answered")
    until(
        lambda: (
            before.pid not in {p.pid for h in stack.hosts for p in parts(h, "ndif.server.leader")}
        )
    )
    stack.client(1).run("scenario_a_trace")


def test_job_of_dead_node_runs_on_another_node(stack: Stack) -> None:
    stack.client().run("scenario_a_long_job_is_sent")
    busy = next(node for node in stack.ray.nodes if node.runs("ndif.runtime"))
    until(lambda: running(stack.hosts[0]))
    busy.kill()
    stack.client().run("scenario_all_that_was_sent_is_answered")


def test_restarted_ray_head_finds_its_replicas(stack: Stack) -> None:
    def processes() -> set[int]:
        return {p.pid for p in stack.ray.workers("NodeActor")}

    until(processes)
    before = processes()
    stack.client().run("scenario_a_long_job_is_sent")
    stack.ray.head.kill()
    # Before that, the leader still reaches the replicas, and jobs run.
    until(lambda: any("cannot be reached" in log(host) for host in stack.hosts))
    job = send(stack.hosts[0]).json()["id"]
    until(lambda: "cannot be reached. Your job waits" in answer(stack.hosts[0], job)["description"])
    stack.ray.head.start()
    stack.client().run("scenario_all_that_was_sent_is_answered")
    # The job ran and failed as expected.
    until(lambda: answer(stack.hosts[0], job)["status"] == "ERROR")
    assert processes() & before
    stack.client().run("scenario_a_trace")


def test_results_wait_for_unavailable_object_store(stack: Stack) -> None:
    stack.client().run("scenario_a_long_job_is_sent")
    with stack.s3.away():
        time_passes(10)  # longer than the job and the store's short retry limit
    stack.client().run("scenario_all_that_was_sent_is_answered")


def test_request_during_broker_outage_is_answered_with_503(stack: Stack) -> None:
    stack.redis.pause()
    try:
        refused = send(stack.hosts[0])
    finally:
        stack.redis.resume()
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["retry-after"]) > 0
    assert "broker does not answer" in refused.json()["detail"]
    until(stack.is_running)
    stack.client().run("scenario_a_trace")


def test_clients_of_stopped_gateway_are_notified(stack: Stack) -> None:
    generations = ("0.8", "0.7")
    waiting = [
        Running(stack.client(1, generation), "scenario_the_server_stops_meanwhile")
        for generation in generations
    ]
    until(lambda: running(stack.hosts[1]) >= set(generations))
    gateways = parts(stack.hosts[1], "ndif.server.gateway_process")
    for gateway in gateways:
        gateway.terminate()
    for run in waiting:
        run.ends_well()
    assert not psutil.wait_procs(gateways, timeout=PATIENCE_S)[1]
    until(lambda: len(parts(stack.hosts[1], "ndif.server.gateway_process")) == 2)
    until(lambda: not running(stack.hosts[1]))
    stack.client(1).run("scenario_a_trace")


def test_stopped_hosts_leave_no_processes(stack: Stack) -> None:
    for host in stack.hosts:
        family = psutil.Process(host.process.pid).children(recursive=True)
        assert host.stop(signal.SIGTERM) == 0
        assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
