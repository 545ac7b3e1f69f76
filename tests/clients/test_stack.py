"""Scenarios of two generations on a server of many machines: Redis, S3 and three Ray nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import Client, StartedServer
from tests.clients.table import REFUSED, STACK, chosen
from tests.clients.test_many import ndif, replicas
from tests.clients.test_own_jobs import ndif as output
from tests.cluster.ray.rays import OFFERED, ray_cluster
from tests.conftest import NAME, WIDE, Clients, client_environment
from tests.services.ray import RayServer
from tests.services.redis import RedisServer
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@dataclass
class Stack:
    """A stack of services and its clients, shared by the tests here."""

    host: StartedServer
    ray: RayServer


@pytest.fixture(scope="module")
def stack(
    server_environment: dict[str, str],
    redis: RedisServer,
    s3: SwiftServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """`ndif start` with a broker, an object store, three nodes and two gateway processes."""
    redis.command("flushall")
    folder = tmp_path_factory.mktemp("stack")
    settings = {
        "NDIF_BROKER_URL": redis.url,
        "NDIF_OBJECT_STORE_URL": s3.url,
        "NDIF_OBJECT_STORE_ACCESS_KEY": ACCESS_KEY,
        "NDIF_OBJECT_STORE_SECRET_KEY": SECRET_KEY,
        "NDIF_RUNNER_POOL": "1",
        "NDIF_LOG_FORMAT": "json",
    }
    # Users' files are none of a node's own, though here they lie on one disk.
    own = {"NDIF_SESSION_ROOT": str(folder / "nodes"), "PYTHONPATH": ""}
    nodes = {**server_environment, **settings, **own}
    with ray_cluster(nodes, "one", "two", "three") as ray:
        started = StartedServer(
            NAME,
            environment={
                **server_environment,
                **settings,
                "NDIF_SESSION_ROOT": str(folder / "host"),
                "NDIF_RAY_ADDRESS": ray.address,
                "NDIF_CLUSTER_SECRET": "a secret that nodes are told",
                "NDIF_API_WORKERS": "2",
                "NDIF_HOTSWAPPING": "false",
                "NDIF_CALLBACK_NETWORKS": "127.0.0.0/8",
            },
        )
        try:
            started.ready()
            until(lambda: is_shared(started, NAME))
            yield Stack(started, ray)
        finally:
            started.stop()


@pytest.fixture(scope="module")
def users(
    stack: Stack,
    tiny_gpt2: Path,
    runtimes: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Clients]:
    """Clients of the stack, which also load model files from it."""
    clients = Clients(stack.host, tiny_gpt2, runtimes, tmp_path_factory)
    yield clients
    clients.close()


@pytest.mark.parametrize(("generation", "scenario"), chosen(STACK, "0.8", "0.7"))
def test_scenario_works_across_gateway_processes(
    users: Clients, generation: str, scenario: str
) -> None:
    refusal = REFUSED.get(scenario)
    if refusal is None:
        users[generation].run(scenario)
    else:
        with pytest.raises(AssertionError, match=refusal):
            users[generation].run(scenario)


def logs_of(stack: Stack) -> dict[str, list[str]]:
    """Return the newest log lines of each kind of process."""
    return {
        "gateway": output(stack.host, "logs", "-n", "2000").splitlines(),
        "dispatcher": output(stack.host, "logs", "dispatcher", "-n", "2000").splitlines(),
        "replica": stack.ray.worker_logs().splitlines(),
    }


def test_logs_contain_no_user_output_or_code(stack: Stack, users: Clients) -> None:
    users["0.8"].run("scenario_statuses_in_order")  # prints "from the block"
    users["0.8"].run("scenario_an_error_names_the_users_line")
    for lines in logs_of(stack).values():
        assert len(lines) > 5
        assert not [line for line in lines if "from the block" in line or "torch.ones" in line]


def test_trace_of_request_matches_its_log_lines(stack: Stack, users: Clients) -> None:
    """Gateway, dispatcher and replica log one line per step with the job's id."""
    users["0.8"].run("scenario_in_place_edit")
    job = json.loads(output(stack.host, "jobs", "list", "--limit", "1", "--json"))["jobs"][0]["id"]

    def ended() -> dict[str, Any] | None:
        steps: dict[str, Any] = json.loads(output(stack.host, "trace", job, "--json"))
        return steps if steps["ended"] else None

    trace = until(ended)
    logs = logs_of(stack)
    events_by_process = {
        process: [
            event
            for event in (
                json.loads(line) for line in lines if line.startswith("{") and job in line
            )
            if event.get("job") == job and "step" in event
        ]
        for process, lines in logs.items()
    }
    steps = {
        process: {(event["by"], event["step"]) for event in events}
        for process, events in events_by_process.items()
    }
    assert steps["gateway"] == {("gateway", "receive"), ("gateway", "submit")}
    assert steps["dispatcher"] == {("queue", name) for name in ("received", "queued", "dispatched")}
    in_replica = {
        ("replica", name) for name in ("acquire", "payload", "send", "running", "deliver")
    }
    assert in_replica | {("runner", "execute"), ("runner", "pack")} < steps["replica"]
    assert {event["process"] for event in events_by_process["replica"]} == {"replica"}
    (replica,) = {event["replica"] for event in events_by_process["replica"]}
    assert replica in {row["replica_id"] for row in replicas(stack.host, NAME)}
    assert {(step["by"], step["name"]) for step in trace["steps"]} == {
        *steps["dispatcher"],
        *steps["replica"] - {("replica", "deliver")},  # with which the dispatcher was told of them
        ("gateway", "receive"),
    }
    shown = output(stack.host, "trace", job[:13])
    assert "execute" in shown
    assert "█" in shown


@pytest.fixture(scope="module")
def of_the_wide(
    stack: Stack, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client of a model with a replica on each node."""
    # No node fits two replicas.
    settings = {
        "dedicated": True,
        "replicas": 3,
        "padding_bytes": OFFERED.cpu_bytes * 2 // 3,
        "runtime": "0.8",
    }
    file = tmp_path_factory.mktemp("wide") / "deployments.json"
    file.write_text(json.dumps({WIDE: settings}))
    ndif(stack.host, "deploy", "--deployment-config", str(file))
    until(lambda: running(stack.host, WIDE) == 3 and is_shared(stack.host, WIDE))
    environment = client_environment(stack.host, tmp_path_factory.mktemp("client"), None)
    client = Client("scenarios_replicas", WIDE, tiny_gpt2, environment)
    yield client
    client.close()


def is_shared(host: StartedServer, name: str) -> bool:
    """Return True if clients can download the files of a model."""
    return host.get(f"/hub/api/models/{name}")[0] == 200


def running(host: StartedServer, name: str) -> int:
    """Return the number of running replicas of a model."""
    return sum(replica["state"] == "RUNNING" for replica in replicas(host, name))


def test_each_node_runs_job_at_same_time(stack: Stack, of_the_wide: Client) -> None:
    assert len({replica["node_id"] for replica in replicas(stack.host, WIDE)}) == 3
    assert all(node.runs("ndif.runtime") for node in stack.ray.nodes)
    of_the_wide.run("scenario_three_untrusted_jobs_run_side_by_side")


def test_two_nodes_continue_after_third_is_lost(stack: Stack, of_the_wide: Client) -> None:
    """The third node is killed while it runs a job."""
    scenario = "scenario_untrusted_jobs_while_a_node_is_lost"
    with ThreadPoolExecutor() as threads:
        jobs = threads.submit(of_the_wide.run, scenario)
        until(lambda: all(r["request_id"] for r in replicas(stack.host, WIDE)))
        stack.ray.nodes[-1].kill()
        jobs.result()
    # The lost replica fits on no other node.
    until(lambda: running(stack.host, WIDE) == 2)
