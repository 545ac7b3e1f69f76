"""`ndif start` with its own services, with foreign ones, and for services alone: real Redis and Ray."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError

from ndif.config.settings import Settings
from ndif.launch.run_folder import started_at
from ndif.launch.services.redis import broker as find_broker
from ndif.launch.services.service import ServiceError
from ndif.stores.broker.encoding import encode_request
from tests.cli.test_start import Place, a_place, send
from tests.cluster.ray.rays import a_request
from tests.conftest import NAME
from tests.services.packages import go_without, need
from tests.services.process import HOST, accepts, free_port
from tests.services.redis import RedisServer
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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
"""A stand-in for MinIO that answers and stores nothing."""


@pytest.fixture
def place(server_environment: dict[str, str], tmp_path: Path) -> Iterator[Place]:
    yield from a_place(server_environment, tmp_path / "sessions")


@pytest.fixture
def broker() -> dict[str, str]:
    """Variables for a broker that `ndif start` starts."""
    need("redis-server", "redis-server")
    return {"NDIF_BROKER_URL": f"redis://:secret@127.0.0.1:{free_port()}/0"}


@pytest.fixture
def unlocked(broker: dict[str, str]) -> dict[str, str]:
    """The same variables without a password."""
    return {name: url.replace(":secret@", "") for name, url in broker.items()}


def everything_read_by_ps(place: Place) -> str:
    """Return the command lines of all processes of a place, which every user can read."""
    return "\n".join(place.processes())


def passwords(place: Place) -> list[Path]:
    """Return the files of generated passwords."""
    return [path for path in place.root.rglob("password-*") if path.is_file()]


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    """Variables for an object store that `ndif start` starts, with a stand-in for MinIO."""
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
    """Variables for a Ray head that `ndif start` starts."""

    # Socket paths must be short, and pytest's folders have long paths.
    folder = tempfile.mkdtemp(prefix="ndif-")
    yield {
        "NDIF_RAY_ADDRESS": f"127.0.0.1:{free_port()}",
        "NDIF_RAY_TEMP_DIR": folder,
        "NDIF_NODE_CPU_MEMORY": "1GiB",
    }
    shutil.rmtree(folder, ignore_errors=True)


def port_of(variables: dict[str, str]) -> int:
    """Return the port of the first address in the variables."""
    address = next(value for name, value in variables.items() if name.endswith(("URL", "ADDRESS")))
    return int(address.rpartition(":")[2].partition("/")[0])


def refused(place: Place, *arguments: str, **variables: str) -> str:
    result = place.ndif("start", *arguments, **variables)
    assert (result.code, result.output) == (1, ""), result
    assert not place.root.exists() or [path.name for path in place.root.iterdir()] == [".lock"]
    assert place.processes() == []
    return result.error


def test_own_broker_starts_and_stops_with_server(place: Place, broker: dict[str, str]) -> None:
    info = place.start(**broker)
    assert accepts(port_of(broker))
    (session_service,) = place.read("info")["services"].items()
    assert session_service[0] == "broker"
    assert session_service[1]["whose"] == "of this session"
    assert session_service[1]["answers"] is True
    assert "secret" not in (Path(info["session"]) / "config.json").read_text()
    assert place.read("queue") == {"models": []}
    job = send(info["url"], "no/model", b"x")
    # A restart in place keeps the data and the queue.
    for service in ("broker", "dispatcher", "api"):
        restarted = place.ndif("restart", service)
        assert (restarted.code, restarted.output) == (0, f"The {service} has restarted.\n"), (
            restarted
        )
    assert place.read("info")["pid"] == info["pid"]
    # A service that ends at its start is not reported as restarted.
    data = Path(info["session"]) / "data"
    damaged = {"broker": data / "broker" / "redis.conf", "api": data / "processes" / "config.json"}
    for service, file in damaged.items():
        content = file.read_text()
        file.write_text("damaged")
        failed = place.ndif("restart", service, shows_log=True)
        assert (failed.code, failed.output) == (1, ""), failed
        assert f"The {service} restarted, but ended before it was ready." in failed.error
        assert f"{info['session']}/logs/{service}/output.log ends with:" in failed.error
        assert ("Bad directive" if service == "broker" else "JSONDecodeError") in failed.error
        file.write_text(content)
        # The command succeeds independently of the supervisor's own retries.
        assert place.ndif("restart", service).code == 0
    assert "started no object-store" in place.ndif("restart", "object-store").error
    until(lambda: f"id={job} " in place.ndif("logs", "dispatcher", "-n", "1000").output)
    # The supervisor may have restarted the repaired broker before the command did.
    starts = place.ndif("logs", "broker").output.count("Ready to accept connections")
    assert starts in (3, 4)
    assert place.ndif("stop").code == 0
    assert not accepts(port_of(broker))
    until(lambda: not place.processes(), lambda: str(place.processes()))
    assert not (Path(info["session"]) / "data").exists()


def test_killed_server_leaves_no_service(place: Place, unlocked: dict[str, str]) -> None:
    """The broker requires a generated password if the operator chose none."""
    info, broker = place.start(**unlocked), unlocked
    with pytest.raises(AuthenticationError):
        Redis(port=port_of(broker)).ping()
    (file,) = passwords(place)
    secret = place.root / "cluster_secret"
    for kept in (file, secret):
        assert kept.stat().st_mode & 0o777 == 0o600
    redis = Redis(port=port_of(broker), password=file.read_text().strip())
    place.read("queue")  # so that there are events and answers
    secret_texts = [file.read_text().strip(), secret.read_text().strip()]
    stored = [redis.get(key) for key in redis.scan_iter() if redis.type(key) == b"string"]
    shown = [everything_read_by_ps(place), place.ndif("logs").output, place.ndif("info").output]
    shown += [place.ndif("info", "--config").output, place.ndif("logs", "broker").output]
    assert not any(
        secret_text in text for secret_text in secret_texts for text in (*shown, repr(stored))
    )
    os.kill(info["pid"], signal.SIGKILL)
    until(lambda: started_at(info["pid"]) is None)
    until(lambda: not place.processes(), lambda: str(place.processes()))
    assert not accepts(port_of(broker))
    # The next broker has another password.
    place.start(**unlocked)
    (again,) = passwords(place)
    assert again != file
    assert place.read("queue") == {"models": []}


def test_running_broker_is_shared_and_keeps_running(
    place: Place, server_environment: dict[str, str], tmp_path: Path
) -> None:
    """Two hosts with one secret share the broker; a host without it or with another does not start."""
    with (
        RedisServer(tmp_path) as redis,
        contextlib.contextmanager(a_place)(server_environment, tmp_path / "other") as other,
    ):
        port = port_of({"NDIF_BROKER_URL": redis.url})
        Redis(port=port).config_set("requirepass", "of-its-own")
        assert "asks for a password" in refused(place, NDIF_BROKER_URL=redis.url)
        Redis(port=port, password="of-its-own").config_set("requirepass", "")
        message = refused(place, NDIF_BROKER_URL=redis.url)
        match = re.search(r"^ *export (NDIF_CLUSTER_SECRET)=(\S{40,})$", message, re.MULTILINE)
        assert match, message
        variables = {"NDIF_BROKER_URL": redis.url, match[1]: match[2]}
        started = place.start(**variables)
        assert place.read("info")["services"]["broker"]["whose"] == "not of this session"
        assert "started no broker" in place.ndif("logs", "broker").error
        until(lambda: place.ndif("status").code == 0)
        assert "Set the same secret" in refused(other, NDIF_BROKER_URL=redis.url)
        message = refused(other, **{**variables, match[1]: "of some other server"})
        assert "has another NDIF_CLUSTER_SECRET" in message
        elsewhere = other.start(**variables)
        # The leader and the other host's gateway trust each other.
        assert other.read("status")["nodes"] == place.read("status")["nodes"]
        job = send(elsewhere["url"], "no/model", b"x")
        until(lambda: f"id={job} " in place.ndif("logs", "dispatcher", "-n", "1000").output)
        # An unsigned request that is written to Redis is rejected.
        forged = a_request(subscription_id=None, trusted=True)
        Redis(port=redis.port).xadd("queue", {"request": encode_request(forged)})
        until(lambda: response(started["url"], forged.id).get("status") == "ERROR")
        message = response(started["url"], forged.id)["description"]
        assert "without the signature of one of this server's gateways" in message
        assert "of the queue is refused" in place.ndif("logs", "dispatcher").output
        assert match[2] not in (Path(started["session"]) / "config.json").read_text()
        assert other.ndif("stop").code == 0
        assert place.ndif("stop").code == 0
        assert redis.command("ping") == "PONG"


def response(url: str, job: str) -> dict[str, Any]:
    """Return the answer to a poll, which is an error while the job is unknown."""
    answer: dict[str, Any] = httpx.get(f"{url}/response/{job}").json()
    return answer


def test_broker_reachable_from_other_machines_needs_password(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing
        except OSError:
            go_without("this machine has no address that others reach")
        address = probe.getsockname()[0]
    with RedisServer(tmp_path, "--bind", address, HOST, "--protected-mode", "no") as redis:
        url = f"redis://{address}:{redis.port}/0"
        with pytest.raises(ServiceError, match="every machine that reaches it") as raised:
            find_broker(Settings(broker_url=url), may_start=True)
        assert "NDIF_ALLOW_OPEN_BROKER=true" in str(raised.value)
        # A password for one user does not close the broker for the default user.
        redis.command("acl", "setuser", "friend", "on", ">secret", "~*", "&*", "+@all")
        with_friend = Settings(broker_url=url.replace("redis://", "redis://friend:secret@"))
        with pytest.raises(ServiceError, match="every machine that reaches it"):
            find_broker(with_friend, may_start=True)
        for fine in (
            Settings(broker_url=redis.url),
            Settings(broker_url=url, allow_open_broker=True),
        ):
            assert find_broker(fine, may_start=True) is None
        redis.command("config", "set", "requirepass", "secret")
        with_password = url.replace("redis://", "redis://:secret@")
        assert find_broker(Settings(broker_url=with_password), may_start=True) is None


def test_failed_service_stops_services_started_before_it(
    place: Place, broker: dict[str, str], store: dict[str, str]
) -> None:
    store["NDIF_OBJECT_STORE_ACCESS_KEY"] = "broken"
    for detach in ([], ["--detach"]):
        message = refused(place, *detach, **broker, **store)
        assert f"The object-store at {store['NDIF_OBJECT_STORE_URL']} did not come up" in message
        assert "the drive is on fire" in message
        assert not accepts(port_of(broker))


def test_standalone_services_outlive_server(
    place: Place, broker: dict[str, str], store: dict[str, str]
) -> None:
    result = place.ndif("start", "api", "--detach", **broker, **store)
    assert "`ndif start broker` starts one there" in result.error
    assert "`ndif start object-store` starts a MinIO there" in result.error
    for word in ("object-store", "broker"):
        started = place.ndif("start", word, "--detach", **broker, **store)
        assert started.code == 0, started
        result = place.ndif("start", word, **broker, **store).error
        assert re.search(rf"An? {word} is running already .* with `ndif stop --services`", result)
    services = place.read("info")["services"]
    assert {name: service["answers"] for name, service in services.items()} == {
        "broker": True,
        "object-store": True,
    }
    started = place.ndif("stop")
    assert started.code == 3
    assert (
        f"The object-store at {store['NDIF_OBJECT_STORE_URL']} and the broker at " in started.error
    )
    assert "still run; `ndif stop --services` stops them." in started.error
    assert all(accepts(port_of(url)) for url in (broker, store))
    assert place.ndif("stop", "--services", "--url", "http://elsewhere").code == 2
    started = place.ndif("stop", "--services")
    assert [line.split()[1] for line in started.output.splitlines()] == ["object-store", "broker"]
    assert not accepts(port_of(broker))
    assert not accepts(port_of(store))
    assert place.ndif("stop", "--services").code == 3


def test_standalone_broker_keeps_queue_after_server_stops(
    place: Place, unlocked: dict[str, str]
) -> None:
    broker = unlocked
    assert place.ndif("start", "broker", "--detach", **broker).code == 0
    assert passwords(place)
    info = place.start("api", **broker)
    job = send(info["url"], NAME, b"opaque")
    result = place.ndif("stop", **broker)
    assert result.code == 0
    left = f"The broker at redis://127.0.0.1:{port_of(broker)}/0 still runs; "
    assert result.output.splitlines()[-1] == f"{left}`ndif stop --services` stops it."
    info = place.ndif("start", "api", "--detach", **broker).output
    assert "a machine that joins this server's Ray cluster, needs:" in info
    until(lambda: place.ndif("kill", job).code == 0)  # the next server has the job
    assert place.ndif("stop", "--services").code == 0
    assert not accepts(port_of(broker))


def test_worker_with_cluster_secret_joins_ray_head(
    place: Place,
    unlocked: dict[str, str],
    store: dict[str, str],
    ray: dict[str, str],
    server_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """Ray requires a token derived from the secret; the worker gets the broker's password through Ray."""
    broker = unlocked
    everything = {**broker, **store, **ray}
    place.start(**everything)
    secret = (place.root / "cluster_secret").read_text().strip()
    assert secret not in everything_read_by_ps(place)
    assert [service["answers"] for service in place.read("info")["services"].values()] == [True] * 3
    with contextlib.contextmanager(a_place)(server_environment, tmp_path / "worker") as worker:
        assert "does not admit this machine" in refused(worker, "--worker", **everything)
        everything["NDIF_CLUSTER_SECRET"] = secret
        result = worker.ndif("start", "--worker", "--detach", **everything)
        assert result.code == 0, result
        assert result.output.startswith("A worker of the cluster at"), result
        assert "A worker of the cluster at" in worker.ndif("logs", "ray").output
        message = worker.ndif("start", "--worker", **everything).error
        assert "A worker is running already" in message
        record = worker.read("info")
        assert record["node_type"] == "worker"
        until(lambda: len(place.read("status")["nodes"]) == 2, lambda: str(place.read("status")))
        assert "Ray runtime started." in worker.ndif("logs", "ray").output
        assert worker.ndif("queue").code == 3
        result = worker.ndif("stop")
        assert result.output.startswith("The worker of the cluster at"), result
        until(lambda: not worker.processes(), lambda: str(worker.processes()))
    assert place.ndif("stop").code == 0
    until(lambda: not place.processes(), lambda: str(place.processes()))
    assert not any(accepts(port_of(url)) for url in (broker, store, ray))


# Problems


def test_variables_name_missing_required_variables(place: Place) -> None:
    message = refused(place, NDIF_API_WORKERS="2", NDIF_RAY_ADDRESS="auto")
    assert "NDIF_API_WORKERS=2 needs NDIF_BROKER_URL" in message
    assert "need NDIF_BROKER_URL and NDIF_OBJECT_STORE_URL" in message
    message = refused(place, "--worker")
    assert "A worker joins the cluster that NDIF_RAY_ADDRESS names" in message
    assert "need NDIF_BROKER_URL and NDIF_OBJECT_STORE_URL" in message
    assert "NDIF_BROKER_URL gives its address" in refused(place, "broker")


def test_missing_programs_are_named_with_install_command(
    place: Place, broker: dict[str, str], store: dict[str, str], ray: dict[str, str]
) -> None:
    nothing = {**broker, **store, **ray, "PATH": "/nowhere"}
    nothing["NDIF_RAY_TEMP_DIR"] = f"/tmp/{'x' * 60}"
    message = refused(place, **nothing)
    assert "minio is not installed" in message
    assert "conda install -c conda-forge minio-server" in message
    assert "quay.io/minio/minio server /data" in message
    assert "bytes too long: a socket of Ray" in message


def test_broker_with_eviction_policy_is_rejected(place: Place, tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory-policy", "allkeys-lru") as redis:
        message = refused(place, NDIF_BROKER_URL=redis.url)
        assert "maxmemory-policy allkeys-lru" in message
        assert "config set maxmemory-policy noeviction" in message


def test_unreachable_remote_broker_is_not_started(place: Place) -> None:
    message = refused(place, NDIF_BROKER_URL="redis://broker.invalid:6379/0")
    assert "Nothing answers at redis://broker.invalid:6379/0 (NDIF_BROKER_URL)" in message
