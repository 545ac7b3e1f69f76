"""Shared fixtures: tiny models, a loopback hub, installed runtimes, servers, a client per generation."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.config.settings import settings
from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from tests.clients.harness import Client, LocalServer
from tests.commands import NDIF
from tests.host.machines import Machine, pretend_driver
from tests.http import prepare_http
from tests.serving import serving

pytest_plugins = [
    "tests.services.fixtures",
    "tests.costs",
    "tests.failures",
    "tests.fuzzing",
    "tests.leftovers",
    "tests.markers",
]

CACHE = Path(__file__).parent.parent / ".cache"
NAME = "test-org/tiny-gpt2"
WIDE = "test-org/wide"
"""Another name of the same model."""
ADAPTER = "test-org/tiny-adapter"
OLDER = ("0.7", "0.6")

# Processes of the tests import tests/templates/sitecustomize.py from a folder that belongs to this run.
_TEMPLATES = "ndif-templates-"
_FOUND = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
_FOLDER = next((folder for folder in _FOUND if _TEMPLATES in folder), None)
if _FOLDER is None:  # otherwise the parent of this test process made the folder
    _FOLDER = tempfile.mkdtemp(prefix=_TEMPLATES)
    Path(_FOLDER, "owner").write_text(str(os.getpid()))
    for _file in (Path(__file__).parent / "templates").glob("*.py"):
        Path(_FOLDER, _file.name).symlink_to(_file)
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *_FOUND])
    atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)

prepare_http()


@pytest.fixture(autouse=True)
def _settings_of_each_test() -> None:
    """Clear the cached settings: a process reads them once, and each test stands for a new process."""
    settings.cache_clear()


@pytest.fixture
def without_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers start without templates, as they do in production."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(folder for folder in _FOUND if folder != _FOLDER)
    )


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of a few thousand parameters, with a tokenizer."""
    from tests.tiny_models import make_gpt2  # imports torch, which most tests do not need

    return make_gpt2(tmp_path_factory.mktemp("models") / "tiny-gpt2")


@pytest.fixture(scope="session")
def tiny_adapter(tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for the tiny GPT-2."""
    from tests.tiny_models import make_adapter

    return make_adapter(tmp_path_factory.mktemp("models") / "tiny-adapter", tiny_gpt2)


@pytest.fixture(scope="session")
def hub_url(tiny_gpt2: Path, tiny_adapter: Path) -> Iterator[str]:
    """A hub on loopback that serves the tiny models with their weights."""
    hub = HfMirror(share_weights=True)
    hub.serve(MirroredModel(NAME, tiny_gpt2, None, "text-generation"))
    hub.serve(MirroredModel(WIDE, tiny_gpt2, None, "text-generation"))
    hub.serve(MirroredModel(ADAPTER, tiny_adapter, None, None))
    with serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as url:
        yield f"{url}/hub"


@pytest.fixture(scope="session")
def runtimes() -> Path:
    """A folder with every older generation, installed once and kept between runs."""
    folder = CACHE / "runtimes"
    environment = {**os.environ, "NDIF_RUNTIMES_DIR": str(folder)}
    folder.mkdir(parents=True, exist_ok=True)
    with (CACHE / "runtimes.lock").open("w") as lock:
        # Test processes run in parallel; in a fresh clone all of them find the folder missing at once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for generation in OLDER:
            if not (folder / generation).is_dir():
                subprocess.run([NDIF, "runtime", "add", generation], check=True, env=environment)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the demo's model, which has real weights; made once and kept between runs."""
    folder = CACHE / "smollm2-135m"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            prepare = Path(__file__).parent.parent / "examples" / "prepare_model.py"
            subprocess.run([sys.executable, prepare, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def server_environment(
    hub_url: str, runtimes: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Variables with which a server finds models and runtimes on this machine alone."""
    return {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(tmp_path_factory.mktemp("server-hf")),
        "NDIF_RUNTIMES_DIR": str(runtimes),
        "NDIF_SESSION_ROOT": str(tmp_path_factory.mktemp("session")),
    }


@pytest.fixture(scope="session")
def server(server_environment: dict[str, str]) -> Iterator[LocalServer]:
    """`ndif local start` on the tiny GPT-2, loaded from the loopback hub."""
    started = LocalServer(NAME, environment=server_environment)
    try:
        yield started.ready()
    finally:
        started.stop()


def client_environment(server: LocalServer, home: Path, overlay: Path | None) -> dict[str, str]:
    """Return the variables of an offline client, which reaches only the server."""
    return {
        "NDIF_HOST": server.url,
        "HF_ENDPOINT": f"{server.url}/hub",
        "HF_HOME": str(home),
        "NDIF_API_KEY": "",
        **({"PYTHONPATH": str(overlay)} if overlay else {}),
    }


@pytest.fixture(scope="session")
def sandboxed(server_environment: dict[str, str]) -> Iterator[LocalServer]:
    """The same server with `--sandbox`; webhooks and mails may reach this machine."""
    environment = {**server_environment, "NDIF_CALLBACK_NETWORKS": "127.0.0.0/8"}
    started = LocalServer(NAME, "--sandbox", environment=environment)
    try:
        yield started.ready()
    finally:
        started.stop()


class Clients:
    """A client of each generation, started at its first use and kept."""

    def __init__(
        self,
        server: LocalServer,
        folder: Path,
        runtimes: Path,
        factory: pytest.TempPathFactory,
    ) -> None:
        self._server = server
        self._folder = folder
        self._runtimes = runtimes
        self._factory = factory
        self._started: dict[str, Client] = {}

    def __getitem__(self, generation: str) -> Client:
        """Return the client of a generation."""
        if generation not in self._started:
            overlay = None if generation == "0.8" else self._runtimes / generation
            scenarios = "scenarios_headers" if overlay else "scenarios_08"
            home = self._factory.mktemp(f"client-{generation}")
            environment = client_environment(self._server, home, overlay)
            self._started[generation] = Client(scenarios, NAME, self._folder, environment)
        return self._started[generation]

    def close(self) -> None:
        """End all clients."""
        for client in self._started.values():
            client.close()


@pytest.fixture(scope="session")
def clients(
    server: LocalServer, tiny_gpt2: Path, runtimes: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clients]:
    """Clients of the server without a sandbox."""
    started = Clients(server, tiny_gpt2, runtimes, tmp_path_factory)
    yield started
    started.close()


@pytest.fixture(scope="session")
def untrusted(
    sandboxed: LocalServer,
    tiny_gpt2: Path,
    runtimes: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Clients]:
    """Clients of the sandboxed server."""
    started = Clients(sandboxed, tiny_gpt2, runtimes, tmp_path_factory)
    yield started
    started.close()


@pytest.fixture(scope="session")
def client_08(clients: Clients) -> Client:
    """A client of nnsight 0.8."""
    return clients["0.8"]


@pytest.fixture(scope="session")
def client_07(clients: Clients) -> Client:
    """A client of nnsight 0.7."""
    return clients["0.7"]


@pytest.fixture(scope="session")
def client_06(clients: Clients) -> Client:
    """A client of nnsight 0.6."""
    return clients["0.6"]


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fake NVML library."""
    return pretend_driver(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose GPUs the fake NVML library reports."""
    machine = Machine(tmp_path / "machine")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml))
    monkeypatch.setenv("PRETEND_NVML", str(machine.file))
    return machine
