"""`ndif start`: many models on one machine, with real clients and real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.gateway.hub import Hub, HubModel
from tests.clients.harness import NDIF, Client, StartedServer
from tests.serving import serving
from tests.tiny_models import make_bert, make_gpt2, make_llama

PATIENCE_S = 60
ONE_FITS = "1x1.5MB"
"""A GPU that any of the tiny models has for itself, and that two do not fit on."""

Start = Callable[..., StartedServer]
Serve = Callable[..., Client]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two that continue texts, of different architectures, and an encoder."""
    folder = tmp_path_factory.mktemp("many")
    return {
        "tests/gpt2": make_gpt2(folder / "gpt2"),
        "tests/llama": make_llama(folder / "llama"),
        "tests/bert": make_bert(folder / "bert"),
    }


@pytest.fixture(scope="module")
def hub(models: dict[str, Path]) -> Iterator[str]:
    """A hub that gives them away."""
    found = Hub(share_weights=True)
    for name, folder in models.items():
        task = "fill-mask" if "bert" in name else "text-generation"
        found.serve(HubModel(name, folder, None, task))
    with serving(Starlette(routes=[Mount("/hub", routes=found.routes())])) as url:
        yield f"{url}/hub"


@pytest.fixture
def start(hub: str, runtimes: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts `ndif start` with settings of a test's own; it is ended with the test."""
    started: list[StartedServer] = []

    def begin(*arguments: str, **settings: str) -> StartedServer:
        environment = {
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / "server-hf"),
            "NDIF_RUNTIMES_DIR": str(runtimes),
            "NDIF_SESSION_ROOT": str(tmp_path / "sessions"),
            "NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS": "0",
            "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
            **settings,
        }
        started.append(StartedServer(*arguments, environment=environment))
        return started[-1].ready()

    yield begin
    for server in started:
        server.stop()


@pytest.fixture
def client(hub: str, models: dict[str, Path], runtimes: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts a client of a generation, on one of the models."""
    started: list[Client] = []

    def begin(server: StartedServer, name: str, generation: str = "0.8", key: str = "") -> Client:
        environment = {
            "NDIF_HOST": server.url,
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / f"client-hf-{len(started)}"),
            "NDIF_API_KEY": key,
        }
        if generation != "0.8":
            environment["PYTHONPATH"] = str(runtimes / generation)
        started.append(Client("scenarios_many", name, models[name], environment))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def ndif(server: StartedServer, *arguments: str, rc: int = 0) -> Any:
    """A command of the operator's: what it prints as JSON."""
    done = subprocess.run(
        [NDIF, *arguments, "--json"],
        env={**os.environ, **server.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


def replicas(server: StartedServer, name: str) -> list[dict[str, Any]]:
    """A model's replicas, of every generation."""
    status = ndif(server, "status")
    return [r for model in status["models"] if model["repo_id"] == name for r in model["replicas"]]


def levels(server: StartedServer, name: str) -> list[str]:
    return [replica["level"] for replica in replicas(server, name)]


def until(condition: Callable[[], Any]) -> Any:
    """Wait for something to be so; what it is then."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


class Running:
    """A scenario that runs while a test does something else."""

    def __init__(self, client: Client, scenario: str) -> None:
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(client, scenario))
        self._thread.start()

    def _run(self, client: Client, scenario: str) -> None:
        try:
            client.run(scenario)
        except BaseException as failure:
            self._failure = failure

    def ends_well(self) -> None:
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure


@pytest.mark.parametrize("generation", ["0.8", "0.7"])
def test_models_are_loaded_when_somebody_asks_for_them(
    generation: str, start: Start, client: Serve
) -> None:
    server = start()
    assert ndif(server, "status")["models"] == []
    names = ["tests/gpt2", "tests/llama"]
    if generation == "0.8":  # earlier ones know no encoders
        names.append("tests/bert")
    for name in names:
        client(server, name, generation).run("scenario_a_trace")
        assert levels(server, name) == ["HOT"]


def test_two_models_that_do_not_fit_together_take_turns(start: Start, client: Serve) -> None:
    server = start(NDIF_NODE_GPUS=ONE_FITS)
    gpt2, llama = client(server, "tests/gpt2"), client(server, "tests/llama", "0.7")
    gpt2.run("scenario_a_trace")
    (first,) = replicas(server, "tests/gpt2")
    assert not first["on_cpu"]
    llama.run("scenario_a_trace")
    # Either stays on the CPU where it has been sent to, or waits there for its turn.
    assert levels(server, "tests/llama") == ["HOT"]
    assert levels(server, "tests/gpt2") == ["WARM"]
    processes = server.processes()
    for _ in range(2):
        gpt2.run("scenario_a_trace")
        assert levels(server, "tests/gpt2") == ["HOT"]
        assert levels(server, "tests/llama") == ["WARM"]
        llama.run("scenario_a_trace")
    # They have come back as the processes that they were.
    assert server.processes() == processes
    assert [r["replica_id"] for r in replicas(server, "tests/gpt2")] == [first["replica_id"]]


def test_both_models_serve_their_users_while_they_displace_each_other(
    start: Start, client: Serve
) -> None:
    server = start(NDIF_NODE_GPUS=ONE_FITS)
    users = [client(server, name) for name in ("tests/gpt2", "tests/llama")]
    for each in [Running(user, "scenario_one_at_a_time") for user in users]:
        each.ends_well()


def test_a_model_that_is_protected_is_not_displaced_and_why_is_told(
    start: Start, client: Serve
) -> None:
    server = start(
        NDIF_NODE_GPUS=ONE_FITS,
        NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS="600",
        NDIF_NODE_CPU_MEMORY="500kB",
    )
    client(server, "tests/gpt2").run("scenario_a_trace")
    with pytest.raises(AssertionError) as refused:
        client(server, "tests/llama").run("scenario_a_trace")
    said = str(refused.value)
    assert "'tests/gpt2' is protected for another" in said
    assert re.search(r"Try again in \d+ min", said)


def test_three_replicas_under_load_and_one_is_killed(start: Start, client: Serve) -> None:
    server = start()
    ndif(server, "deploy", "tests/gpt2", "--replicas", "3")
    assert levels(server, "tests/gpt2") == ["HOT"] * 3
    user = client(server, "tests/gpt2")
    user.run("scenario_three_replicas_share_the_load")
    running = Running(user, "scenario_four_long_jobs")
    busy = until(lambda: ndif(server, "queue")["models"][0]["running"])
    assert busy
    time.sleep(1)  # in the middle of them
    os.kill(sorted(server.processes())[-1], signal.SIGKILL)
    running.ends_well()
    assert any("it is tried again" in line for line in server.output), list(server.output)


def test_replicas_come_and_go_while_jobs_run(start: Start, client: Serve) -> None:
    server = start()
    ndif(server, "deploy", "tests/gpt2")
    user = client(server, "tests/gpt2")
    running = Running(user, "scenario_four_long_jobs")
    until(lambda: ndif(server, "queue")["models"][0]["running"])
    ndif(server, "scale", "tests/gpt2", "3")
    until(lambda: [r["state"] for r in replicas(server, "tests/gpt2")] == ["RUNNING"] * 3)
    ndif(server, "scale", "tests/gpt2", "1")
    running.ends_well()
    assert sorted(levels(server, "tests/gpt2")) == ["HOT", "WARM", "WARM"]
    user.run("scenario_one_at_a_time")
    # Those that are WARM are the first to come back.
    before = {replica["replica_id"] for replica in replicas(server, "tests/gpt2")}
    ndif(server, "scale", "tests/gpt2", "3")
    until(lambda: levels(server, "tests/gpt2") == ["HOT"] * 3)
    assert {replica["replica_id"] for replica in replicas(server, "tests/gpt2")} == before
    user.run("scenario_three_replicas_share_the_load")


def test_a_model_is_evicted_while_jobs_run(start: Start, client: Serve) -> None:
    server = start()
    ndif(server, "deploy", "tests/gpt2")
    user = client(server, "tests/gpt2")
    running = Running(user, "scenario_evicted")
    until(lambda: ndif(server, "queue")["models"][0]["waiting"])
    until(lambda: ndif(server, "queue")["models"][0]["running"])
    ndif(server, "evict", "tests/gpt2")
    running.ends_well()
    assert levels(server, "tests/gpt2") == ["WARM"]
    user.run("scenario_a_trace")
    assert levels(server, "tests/gpt2") == ["HOT"]


def test_jobs_are_killed_wherever_they_are(start: Start, client: Serve) -> None:
    server = start()
    ndif(server, "deploy", "tests/gpt2")
    user = client(server, "tests/gpt2")
    running = Running(user, "scenario_killed")
    line = until(
        lambda: next(
            (m for m in ndif(server, "queue")["models"] if m["running"] and m["waiting"]), None
        )
    )
    ndif(server, "kill", line["waiting"][0]["request_id"])
    ndif(server, "kill", line["running"][0]["request_id"])
    ndif(server, "kill", "no-such-job", rc=4)
    running.ends_well()
    user.run("scenario_a_trace")


def test_without_access_only_dedicated_models_are_served(start: Start, client: Serve) -> None:
    server = start("tests/llama", NDIF_HOTSWAPPING="false")
    client(server, "tests/llama").run("scenario_a_trace")
    client(server, "tests/gpt2").run("scenario_refused")
    assert levels(server, "tests/gpt2") == []


def test_keys_say_who_may_do_what(start: Start, client: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n"
        "  - {key: may-do-much, user: ada@example.org, tags: [hotswapping]}\n"
        "  - {key: may-do-little}\n"
    )
    server = start("tests/llama", NDIF_API_KEYS=str(keys))
    with pytest.raises(AssertionError, match="does not know the API key"):
        client(server, "tests/llama", key="nobody-knows-it").run("scenario_a_trace")
    client(server, "tests/gpt2", key="may-do-little").run("scenario_refused")
    client(server, "tests/gpt2", key="may-do-much").run("scenario_a_trace")
    client(server, "tests/llama", "0.7", key="may-do-little").run("scenario_a_trace")
