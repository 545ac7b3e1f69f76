"""`ndif start` with services of its own, beside others, and alone: real Redis, real Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndif.launch.run_folder import started_at
from tests.cli.test_start import Place, a_place, send, within
from tests.conftest import NAME
from tests.services.packages import need
from tests.services.process import accepts, free_port
from tests.services.redis import RedisServer

MINIO = """\
#!{python}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if os.environ["MINIO_ROOT_USER"] == "broken":
    sys.exit("the drive is on fire")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(403)
        self.end_headers()
    do_PUT = do_HEAD = do_POST = do_GET
host, _, port = sys.argv[sys.argv.index("--address") + 1].rpartition(":")
HTTPServer((host, int(port)), Handler).serve_forever()
"""
"""A stand-in for MinIO that answers and gives nothing."""


@pytest.fixture
def place(server_environment: dict[str, str], tmp_path: Path) -> Iterator[Place]:
    yield from a_place(server_environment, tmp_path / "sessions")


@pytest.fixture
def broker() -> dict[str, str]:
    """Where a broker of ours is to be."""
    need("redis-server", "redis-server")
    return {"NDIF_BROKER_URL": f"redis://:secret@127.0.0.1:{free_port()}/0"}


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    """Where an object store of ours is to be, and what stands for its program."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "minio"
    program.write_text(MINIO.format(python="/usr/bin/env python3"))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "NDIF_OBJECT_STORE_URL": f"http://127.0.0.1:{free_port()}",
        "NDIF_OBJECT_STORE_ACCESS_KEY": "access",
        "NDIF_OBJECT_STORE_SECRET_KEY": "secret-key",
    }


@pytest.fixture
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where a head of ours is to be."""

    # Sockets' names are short, and pytest's folders are not.
    folder = tempfile.mkdtemp(prefix="ndif-")
    yield {
        "NDIF_RAY_ADDRESS": f"127.0.0.1:{free_port()}",
        "NDIF_RAY_TEMP_DIR": folder,
        "NDIF_NODE_CPU_MEMORY": "1GiB",
    }
    shutil.rmtree(folder, ignore_errors=True)


def port_of(variables: dict[str, str]) -> int:
    """Of the first address in them."""
    address = next(value for name, value in variables.items() if name.endswith(("URL", "ADDRESS")))
    return int(address.rpartition(":")[2].partition("/")[0])


def refused(place: Place, *arguments: str, **variables: str) -> str:
    done = place.ndif("start", *arguments, **variables)
    assert (done.code, done.output) == (1, ""), done
    assert not place.root.exists() or [path.name for path in place.root.iterdir()] == [".lock"]
    assert place.processes() == []
    return done.error


def test_a_broker_of_ours_comes_and_goes_with_the_server(
    place: Place, broker: dict[str, str]
) -> None:
    said = place.start(**broker)
    assert accepts(port_of(broker))
    (found,) = place.read("info")["services"].items()
    assert found[0] == "broker"
    assert found[1]["whose"] == "of this session"
    assert found[1]["answers"] is True
    assert "secret" not in (Path(said["session"]) / "config.json").read_text()
    assert place.read("queue") == {"models": []}
    job = send(said["url"], "no/model", b"x")
    # In place, with its data: whoever is in its queue stays there.
    for service in ("broker", "dispatcher", "api"):
        restarted = place.ndif("restart", service)
        assert (restarted.code, restarted.output) == (0, f"The {service} has restarted.\n"), (
            restarted
        )
    assert place.read("info")["pid"] == said["pid"]
    # One that ends as it starts is not said to have restarted.
    data = Path(said["session"]) / "data"
    damaged = {"broker": data / "broker" / "redis.conf", "api": data / "processes" / "config.json"}
    for service, file in damaged.items():
        content = file.read_text()
        file.write_text("damaged")
        failed = place.ndif("restart", service, shows_log=True)
        assert (failed.code, failed.output) == (1, ""), failed
        assert f"The {service} started again and ended before it was up." in failed.error
        assert f"{said['session']}/logs/{service}/output.log, which ends with:" in failed.error
        assert ("Bad directive" if service == "broker" else "JSONDecodeError") in failed.error
        file.write_text(content)
        assert place.ndif("restart", service).code == 0  # whenever its supervisor tries
    assert "started no object-store" in place.ndif("restart", "object-store").error
    assert within(lambda: f"id={job} " in place.ndif("logs", "dispatcher").output)
    assert place.ndif("logs", "broker").output.count("Ready to accept connections") == 3
    assert place.ndif("stop").code == 0
    assert not accepts(port_of(broker))
    assert within(lambda: not place.processes()), place.processes()
    assert not (Path(said["session"]) / "data").exists()


def test_of_a_server_that_is_killed_no_service_is_left(
    place: Place, broker: dict[str, str]
) -> None:
    said = place.start(**broker)
    os.kill(said["pid"], signal.SIGKILL)
    assert within(lambda: started_at(said["pid"]) is None)
    assert within(lambda: not place.processes()), place.processes()
    assert not accepts(port_of(broker))


def test_one_that_answers_is_used_and_stays(place: Place, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        place.start(NDIF_BROKER_URL=redis.url)
        assert place.read("info")["services"]["broker"]["whose"] == "not of this session"
        assert "started no broker" in place.ndif("logs", "broker").error
        assert place.ndif("stop").code == 0
        assert redis.command("ping") == "PONG"


def test_one_that_does_not_come_up_ends_those_before_it(
    place: Place, broker: dict[str, str], store: dict[str, str]
) -> None:
    store["NDIF_OBJECT_STORE_ACCESS_KEY"] = "broken"
    for detach in ([], ["--detach"]):
        said = refused(place, *detach, **broker, **store)
        assert f"The object-store at {store['NDIF_OBJECT_STORE_URL']} did not come up" in said
        assert "the drive is on fire" in said
        assert not accepts(port_of(broker))


def test_services_alone_are_used_by_a_server_and_outlive_it(
    place: Place, broker: dict[str, str], store: dict[str, str]
) -> None:
    said = place.ndif("start", "api", "--detach", **broker, **store)
    assert "`ndif start broker` starts one there" in said.error
    assert "`ndif start object-store` starts a MinIO there" in said.error
    for word in ("object-store", "broker"):
        done = place.ndif("start", word, "--detach", **broker, **store)
        assert done.code == 0, done
        assert "already" in place.ndif("start", word, **broker, **store).error
    found = place.read("info")["services"]
    assert {name: each["answers"] for name, each in found.items()} == {
        "broker": True,
        "object-store": True,
    }
    done = place.ndif("stop")
    assert done.code == 3
    assert f"The object-store at {store['NDIF_OBJECT_STORE_URL']} and the broker at " in done.error
    assert "still run; `ndif stop --services` stops them." in done.error
    assert all(accepts(port_of(each)) for each in (broker, store))
    assert place.ndif("stop", "--services", "--url", "http://elsewhere").code == 2
    done = place.ndif("stop", "--services")
    assert [line.split()[1] for line in done.output.splitlines()] == ["object-store", "broker"]
    assert not accepts(port_of(broker))
    assert not accepts(port_of(store))
    assert place.ndif("stop", "--services").code == 3


def test_a_broker_alone_keeps_its_queue_when_the_server_is_stopped(
    place: Place, broker: dict[str, str]
) -> None:
    assert place.ndif("start", "broker", "--detach", **broker).code == 0
    said = place.start("api", **broker)
    job = send(said["url"], NAME, b"opaque")
    done = place.ndif("stop", **broker)
    assert done.code == 0
    left = f"The broker at redis://(hidden)@127.0.0.1:{port_of(broker)}/0 still runs; "
    assert done.output.splitlines()[-1] == f"{left}`ndif stop --services` stops it."
    place.start("api", **broker)
    assert within(lambda: place.ndif("kill", job).code == 0)  # the next server has it
    assert place.ndif("stop", "--services").code == 0
    assert not accepts(port_of(broker))


def test_a_head_and_a_worker_that_joins_it(
    place: Place,
    broker: dict[str, str],
    store: dict[str, str],
    ray: dict[str, str],
    server_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    everything = {**broker, **store, **ray}
    place.start(**everything)
    assert [each["answers"] for each in place.read("info")["services"].values()] == [True] * 3
    with contextlib.contextmanager(a_place)(server_environment, tmp_path / "worker") as worker:
        done = worker.ndif("start", "--worker", "--detach", **everything)
        assert done.code == 0, done
        record = worker.read("info")
        assert record["node_type"] == "worker"
        assert within(lambda: len(place.read("status")["nodes"]) == 2), place.read("status")
        assert "Ray runtime started." in worker.ndif("logs", "ray").output
        assert worker.ndif("queue").code == 3
        done = worker.ndif("stop")
        assert done.output.startswith("The worker of the cluster at"), done
        assert within(lambda: not worker.processes()), worker.processes()
    assert place.ndif("stop").code == 0
    assert within(lambda: not place.processes()), place.processes()
    assert not any(accepts(port_of(one)) for one in (broker, store, ray))


# What is in the way


def test_variables_that_need_others_say_so(place: Place) -> None:
    said = refused(place, NDIF_API_WORKERS="2", NDIF_RAY_ADDRESS="auto")
    assert "NDIF_API_WORKERS=2 needs NDIF_BROKER_URL" in said
    assert "need NDIF_BROKER_URL and NDIF_OBJECT_STORE_URL" in said
    said = refused(place, "--worker")
    assert "A worker joins the cluster that NDIF_RAY_ADDRESS names" in said
    assert "need NDIF_BROKER_URL and NDIF_OBJECT_STORE_URL" in said
    assert "NDIF_BROKER_URL gives its address" in refused(place, "broker")


def test_programs_that_are_missing_are_named_with_what_installs_them(
    place: Place, broker: dict[str, str], store: dict[str, str], ray: dict[str, str]
) -> None:
    nothing = {**broker, **store, **ray, "PATH": "/nowhere"}
    nothing["NDIF_RAY_TEMP_DIR"] = f"/tmp/{'x' * 60}"
    said = refused(place, **nothing)
    assert "minio is not installed" in said
    assert "conda install -c conda-forge minio-server" in said
    assert "quay.io/minio/minio server /data" in said
    assert "bytes too long: a socket of Ray" in said


def test_a_broker_that_forgets_is_refused(place: Place, tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory-policy", "allkeys-lru") as redis:
        said = refused(place, NDIF_BROKER_URL=redis.url)
        assert "maxmemory-policy allkeys-lru" in said
        assert "config set maxmemory-policy noeviction" in said


def test_one_elsewhere_that_does_not_answer_is_not_ours_to_start(place: Place) -> None:
    said = refused(place, NDIF_BROKER_URL="redis://broker.invalid:6379/0")
    assert "Nothing answers at redis://broker.invalid:6379/0 (NDIF_BROKER_URL)" in said
