"""`ndif start`: many models on one machine, with real clients and real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from tests.clients.harness import Client, StartedServer
from tests.commands import ndif as command
from tests.serving import serving
from tests.tiny_models import make_bert, make_gpt2, make_llama
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

ONE_FITS = "1x1.5MB"
"""A GPU that fits one tiny model and not two."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two text generators of different architectures, and an encoder."""
    folder = tmp_path_factory.mktemp("many")
    return {
        "tests/gpt2": make_gpt2(folder / "gpt2"),
        "tests/llama": make_llama(folder / "llama"),
        "tests/bert": make_bert(folder / "bert"),
    }


@pytest.fixture(scope="module")
def hub(models: dict[str, Path]) -> Iterator[str]:
    """A hub that shares these models."""
    mirror = HfMirror(share_weights=True)
    for name, folder in models.items():
        task = "fill-mask" if "bert" in name else "text-generation"
        mirror.serve(MirroredModel(name, folder, None, task))
    with serving(Starlette(routes=[Mount("/hub", routes=mirror.routes())])) as url:
        yield f"{url}/hub"


class Many:
    """Servers of many models, each with its own settings, and their clients, started once."""

    def __init__(self, hub: str, models: dict[str, Path], runtimes: Path, folder: Path) -> None:
        self._hub = hub
        self._models = models
        self._runtimes = runtimes
        self._folder = folder
        self._servers: dict[tuple[object, ...], StartedServer] = {}
        self._clients: dict[tuple[object, ...], Client] = {}

    def server(self, *arguments: str, **settings: str) -> StartedServer:
        """Run `ndif start` with these arguments and settings in addition to the common ones."""
        named = (*arguments, *sorted(settings.items()))
        if named not in self._servers:
            place = self._folder / f"server-{len(self._servers)}"
            environment = {
                "HF_ENDPOINT": self._hub,
                "HF_HOME": str(place / "hf"),
                "NDIF_RUNTIMES_DIR": str(self._runtimes),
                "NDIF_SESSION_ROOT": str(place / "sessions"),
                "NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS": "0",
                "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
                "NDIF_SCHEDULE": str(self._calendar()),
                **settings,
            }
            self._servers[named] = StartedServer(*arguments, environment=environment)
        server = self._servers[named].ready()
        assert isinstance(server, StartedServer)
        return server

    def _calendar(self) -> Path:
        """Return a calendar with a booking tomorrow, which users can see today."""
        file = self._folder / "calendar.ics"
        tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
        file.write_text(
            "BEGIN:VCALENDAR\nVERSION:2.0\nPRODID:x\nBEGIN:VEVENT\nUID:1\nDTSTAMP:20260301T000000Z\n"
            f"DTSTART:{tomorrow:%Y%m%dT%H%M%SZ}\nDURATION:PT1H\nSUMMARY:tests/scheduled\nEND:VEVENT\n"
            "END:VCALENDAR\n"
        )
        return file

    def client(
        self, server: StartedServer, name: str, generation: str = "0.8", key: str = ""
    ) -> Client:
        """Return a client of a generation for one of the models."""
        named = (server, name, generation, key)
        if named not in self._clients:
            environment = {
                "NDIF_HOST": server.url,
                "HF_ENDPOINT": self._hub,
                "HF_HOME": str(self._folder / f"client-{len(self._clients)}"),
                "NDIF_API_KEY": key,
            }
            if generation != "0.8":
                environment["PYTHONPATH"] = str(self._runtimes / generation)
            folder = self._models[name]
            self._clients[named] = Client("scenarios_many", name, folder, environment)
        return self._clients[named]

    def close(self) -> None:
        """Stop all clients and servers."""
        for client in self._clients.values():
            client.close()
        for server in self._servers.values():
            server.stop()


@pytest.fixture(scope="module")
def many(
    hub: str, models: dict[str, Path], runtimes: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Many]:
    """A server, its clients and their environment, shared by the tests here."""
    started = Many(hub, models, runtimes, tmp_path_factory.mktemp("servers"))
    yield started
    started.close()


@pytest.fixture(params=["0.8", "0.7"])
def generation(request: pytest.FixtureRequest) -> str:
    """The generation of the client and of the replicas that serve it."""
    value: str = request.param
    return value


@pytest.fixture
def server(many: Many, generation: str) -> StartedServer:
    """A server with one ready replica of GPT-2, regardless of its state before."""
    started = many.server()
    ndif(started, "deploy", "tests/gpt2", "--replicas", "1", "--generation", generation)
    until(lambda: levels(started, "tests/gpt2", generation).count("HOT") == 1)
    for replica in replicas(started, "tests/gpt2", generation):
        if replica["level"] == "WARM":
            ndif(started, "evict", "tests/gpt2", "--replica", replica["replica_id"], "--cold")
    until(lambda: levels(started, "tests/gpt2", generation) == ["HOT"])
    return started


@pytest.fixture
def user(many: Many, server: StartedServer, generation: str) -> Client:
    """A client of that replica."""
    return many.client(server, "tests/gpt2", generation)


def ndif(server: StartedServer, *arguments: str, rc: int = 0) -> Any:
    """Run a command of the operator and return its JSON."""
    variables = {**os.environ, **server.environment}
    process = command(*arguments, "--json", environment=variables)
    assert process.returncode == rc, process.stdout + process.stderr
    return json.loads(process.stdout) if process.stdout.strip() else None


def admin(server: StartedServer, path: str) -> list[dict[str, Any]]:
    """Return the models of an admin route, which is faster than a command."""
    token = Path(server.environment["NDIF_SESSION_ROOT"], "current", "token").read_text().strip()
    request = urllib.request.Request(
        f"{server.url}/admin/{path}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request) as response:
        models: list[dict[str, Any]] = json.load(response)["models"]
    return models


def replicas(server: StartedServer, name: str, generation: str = "0.8") -> list[dict[str, Any]]:
    """Return the replicas of a model."""
    models = admin(server, "status")
    named = [m for m in models if (m["repo_id"], m["generation"]) == (name, generation)]
    return [replica for model in named for replica in model["replicas"]]


def levels(server: StartedServer, name: str, generation: str = "0.8") -> list[str]:
    return [replica["level"] for replica in replicas(server, name, generation)]


def line(server: StartedServer, generation: str) -> dict[str, Any]:
    """Return the queue of GPT-2 for a generation; it is empty until the first request."""
    empty: dict[str, Any] = {"running": [], "waiting": []}
    models = admin(server, "queue")
    rows = (m for m in models if (m["repo_id"], m["generation"]) == ("tests/gpt2", generation))
    return next(rows, empty)


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
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def test_models_are_loaded_on_first_request(generation: str, many: Many) -> None:
    server = many.server()
    names = ["tests/gpt2", "tests/llama"]
    if generation == "0.8":  # earlier generations do not serve encoders
        names.append("tests/bert")
    for name in names:
        assert levels(server, name, generation) == []
        many.client(server, name, generation).run("scenario_a_trace")
        assert levels(server, name, generation) == ["HOT"]


def test_two_models_that_do_not_fit_together_alternate_on_gpu(many: Many) -> None:
    server = many.server(NDIF_NODE_GPUS=ONE_FITS)
    gpt2, llama = many.client(server, "tests/gpt2"), many.client(server, "tests/llama")
    gpt2.run("scenario_a_trace")
    (first,) = replicas(server, "tests/gpt2")
    assert not first["on_cpu"]
    llama.run("scenario_a_trace")
    assert levels(server, "tests/llama") == ["HOT"]
    assert levels(server, "tests/gpt2") == ["WARM"]
    processes = server.processes()
    for _ in range(2):
        gpt2.run("scenario_a_trace")
        assert levels(server, "tests/gpt2") == ["HOT"]
        assert levels(server, "tests/llama") == ["WARM"]
        llama.run("scenario_a_trace")
    # The models returned in the same processes.
    assert server.processes() == processes
    assert [r["replica_id"] for r in replicas(server, "tests/gpt2")] == [first["replica_id"]]


def test_models_that_evict_each_other_serve_all_their_users(many: Many) -> None:
    server = many.server(NDIF_NODE_GPUS=ONE_FITS)
    users = [many.client(server, name) for name in ("tests/gpt2", "tests/llama")]
    for running in [Running(user, "scenario_one_at_a_time") for user in users]:
        running.ends_well()


def test_protected_model_is_not_evicted_and_reason_is_reported(many: Many) -> None:
    server = many.server(
        NDIF_NODE_GPUS=ONE_FITS,
        NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS="600",
        NDIF_NODE_CPU_MEMORY="500kB",
    )
    many.client(server, "tests/gpt2").run("scenario_a_trace")
    with pytest.raises(AssertionError) as refused:
        many.client(server, "tests/llama").run("scenario_a_trace")
    message = str(refused.value)
    assert "'tests/gpt2' is protected for another" in message
    assert re.search(r"Try again in \d+m", message)


def test_jobs_survive_kill_of_one_of_three_replicas(
    server: StartedServer, user: Client, generation: str
) -> None:
    before = server.processes()
    ndif(server, "deploy", "tests/gpt2", "--replicas", "3", "--generation", generation)
    assert levels(server, "tests/gpt2", generation) == ["HOT"] * 3
    user.run("scenario_three_replicas_share_the_load")
    running = Running(user, "scenario_four_long_jobs")
    until(lambda: len(line(server, generation)["running"]) == 3)
    os.kill((server.processes() - before).pop(), signal.SIGKILL)
    running.ends_well()
    assert any("it is tried again" in printed for printed in server.output), list(server.output)


def test_replicas_are_scaled_while_jobs_run(
    server: StartedServer, user: Client, generation: str
) -> None:
    running = Running(user, "scenario_four_long_jobs")
    until(lambda: line(server, generation)["running"])
    ndif(server, "scale", "tests/gpt2", "3", "--generation", generation)
    until(
        lambda: [r["state"] for r in replicas(server, "tests/gpt2", generation)] == ["RUNNING"] * 3
    )
    ndif(server, "scale", "tests/gpt2", "1", "--generation", generation)
    running.ends_well()
    assert sorted(levels(server, "tests/gpt2", generation)) == ["HOT", "WARM", "WARM"]
    user.run("scenario_one_at_a_time")
    # WARM replicas return first.
    before = {replica["replica_id"] for replica in replicas(server, "tests/gpt2", generation)}
    ndif(server, "scale", "tests/gpt2", "3", "--generation", generation)
    until(lambda: levels(server, "tests/gpt2", generation) == ["HOT"] * 3)
    assert {
        replica["replica_id"] for replica in replicas(server, "tests/gpt2", generation)
    } == before
    user.run("scenario_three_replicas_share_the_load")


def test_model_is_evicted_while_jobs_run(
    server: StartedServer, user: Client, generation: str
) -> None:
    running = Running(user, "scenario_evicted")
    until(lambda: line(server, generation)["waiting"] and line(server, generation)["running"])
    ndif(server, "evict", "tests/gpt2")
    running.ends_well()
    assert levels(server, "tests/gpt2", generation) == ["WARM"]
    user.run("scenario_a_trace")
    assert levels(server, "tests/gpt2", generation) == ["HOT"]


def test_waiting_and_running_jobs_are_killed(
    server: StartedServer, user: Client, generation: str
) -> None:
    running = Running(user, "scenario_killed")
    until(lambda: line(server, generation)["waiting"] and line(server, generation)["running"])
    ndif(server, "kill", line(server, generation)["waiting"][0]["request_id"])
    ndif(server, "kill", line(server, generation)["running"][0]["request_id"])
    ndif(server, "kill", "no-such-job", rc=4)
    running.ends_well()
    user.run("scenario_a_trace")


def test_key_tags_decide_permissions(many: Many, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n"
        "  - {key: may-do-much, user: ada@example.org, tags: [hotswapping]}\n"
        "  - {key: may-do-little}\n"
        "  - {key: may-do-anything, tags: [trusted]}\n"
    )
    server = many.server("tests/llama", NDIF_API_KEYS=str(keys))
    with pytest.raises(AssertionError, match="does not know the API key"):
        many.client(server, "tests/llama", key="nobody-knows-it").run("scenario_a_trace")
    little, much = [
        many.client(server, "tests/gpt2", key=key) for key in ("may-do-little", "may-do-much")
    ]
    little.run("scenario_refused")
    much.run("scenario_a_trace")
    # The model is loaded now, but not dedicated.
    little.run("scenario_refused")
    many.client(server, "tests/llama", key="may-do-little").run("scenario_a_trace")
    # A replica serves trusted users in a persistent process and other users in separate processes.
    trusted = many.client(server, "tests/llama", key="may-do-anything")
    trusted.run("scenario_one_process_runs_all")
    plain = many.client(server, "tests/llama", key="may-do-little")
    plain.run("scenario_what_untrusted_users_may_not")
    plain.run("scenario_a_trace")
    trusted.run("scenario_one_process_runs_all")


def test_clients_read_every_model_state(
    many: Many, models: dict[str, Path], tmp_path: Path
) -> None:
    # This model can be measured but not loaded.
    broken = shutil.copytree(models["tests/gpt2"], tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    server = many.server()
    ndif(server, "evict", "--all", "--cold")  # models of other tests
    ndif(server, "deploy", "tests/gpt2", "tests/llama")
    ndif(server, "deploy", f"tests/none={broken}", "--dedicated", rc=1)
    try:
        ndif(server, "evict", "tests/llama")
        # 0.6 reads them with the same code as 0.7.
        for generation in ("0.8", "0.7"):
            client = many.client(server, "tests/gpt2", generation)
            client.run("scenario_the_states_that_models_can_have")
    finally:
        ndif(server, "evict", "tests/none")  # the server forgets the model


def test_waiting_clients_are_notified_of_server_stop(many: Many) -> None:
    server = many.server()
    generations = ("0.8", "0.7")
    waiting = [
        Running(
            many.client(server, "tests/gpt2", client_generation),
            "scenario_the_server_stops_meanwhile",
        )
        for client_generation in generations
    ]
    until(
        lambda: all(line(server, client_generation)["running"] for client_generation in generations)
    )
    ndif(server, "stop")
    for running in waiting:
        running.ends_well()
