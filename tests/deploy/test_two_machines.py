"""A server on another machine than Ray's head; namespaces stand for the second machine."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.cli.test_start import Place, a_place
from tests.deploy.container import may_make
from tests.services.packages import go_without, need
from tests.services.process import Process, free_port
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]


@dataclass
class Network:
    """A link between this machine and a namespace."""

    name: str
    here: str
    there: str


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if not may_make():
        go_without("only root makes network namespaces, where the machine lets it")
    need("ip", "iproute2")
    number = random.randrange(16, 240)
    pair = Network(f"ndif{os.getpid()}", f"10.213.{number}.1", f"10.213.{number}.2")
    link, peer = f"nd{os.getpid()}a", f"nd{os.getpid()}b"
    try:
        for command in (
            f"ip netns add {pair.name}",
            f"ip link add {link} type veth peer name {peer} netns {pair.name}",
            f"ip addr add {pair.here}/30 dev {link}",
            f"ip link set {link} up",
            f"ip -n {pair.name} addr add {pair.there}/30 dev {peer}",
            f"ip -n {pair.name} link set {peer} up",
            f"ip -n {pair.name} link set lo up",
        ):
            subprocess.run(command.split(), check=True)
        yield pair
    finally:
        subprocess.run(["ip", "netns", "del", pair.name])


@pytest.fixture(scope="module")
def stores(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A broker and a stand-in for an object store on this side of the link."""
    need("redis-server", "redis-server")
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    listens = f"--bind {network.here} --port {port} --requirepass secret --dir {folder}"
    command = ["redis-server", *listens.split(), "--maxmemory-policy", "noeviction"]
    ping = ["redis-cli", "-h", network.here, "-p", str(port), "-a", "secret", "ping"]

    def answers() -> bool:
        return b"PONG" in subprocess.run(ping, capture_output=True).stdout

    redis = Process(command, folder / "log", answers, cwd=folder)
    store = ThreadingHTTPServer((network.here, 0), SimpleHTTPRequestHandler)
    Thread(target=store.serve_forever, daemon=True).start()
    redis.start()
    try:
        yield {
            "NDIF_BROKER_URL": f"redis://:secret@{network.here}:{port}/0",
            "NDIF_OBJECT_STORE_URL": f"http://{network.here}:{store.server_port}",
            "NDIF_OBJECT_STORE_ACCESS_KEY": "access",
            "NDIF_OBJECT_STORE_SECRET_KEY": "secret-key",
            "NDIF_CLUSTER_SECRET": "a secret of this test alone",
            "NDIF_NODE_CPU_MEMORY": "1GiB",
        }
    finally:
        redis.stop()
        store.shutdown()


@pytest.fixture
def head(stores: dict[str, str], network: Network, tmp_path: Path) -> Iterator[Place]:
    folder = tempfile.mkdtemp(prefix="ndif-")
    ray = {
        "NDIF_RAY_ADDRESS": f"{network.here}:{free_port()}",
        "NDIF_RAY_TEMP_DIR": folder,
    }
    yield from a_place({**stores, **ray}, tmp_path / "head")
    shutil.rmtree(folder, ignore_errors=True)


def test_server_leads_cluster_with_head_on_another_machine(
    head: Place, network: Network, tmp_path: Path
) -> None:
    assert head.ndif("start", "ray", "--detach").code == 0
    assert head.ndif("healthz").output == "Healthy: ray.\n"
    folder = Path(tempfile.mkdtemp(prefix="ndif-"))
    root, port = tmp_path / "api", free_port()
    machine = ["ip", "netns", "exec", network.name]
    machine += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environment = {
        **os.environ,
        **head.environment,
        "NDIF_SESSION_ROOT": str(root),
        "NDIF_RAY_TEMP_DIR": str(folder),
        "NDIF_DEV_MODE": "true",
    }
    program = shutil.which("ndif", path=f"{Path(sys.executable).parent}")
    assert program is not None
    log, where = tmp_path / "log", ("--host", network.there, "--port", str(port))
    with log.open("w") as output:
        process = subprocess.Popen(
            [*machine, program, "start", "api", "--insecure", *where],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        ask = ["curl", "--silent", "--fail", f"http://{network.there}:{port}/status"]

        def state() -> str:
            assert process.poll() is None, log.read_text()
            return subprocess.run(ask, capture_output=True, text=True).stdout

        until(state, log.read_text)
        token = f"@{root / 'current' / 'token'}"
        url = f"http://{network.there}:{port}"
        status = head.read("status", "--url", url, "--token", token)
        # The node on that machine offers no resources.
        assert len(status["nodes"]) == 1
        logs = "".join(file.read_text() for file in root.glob("*/logs/*/output.log"))
        assert "cannot be reached" not in logs
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
