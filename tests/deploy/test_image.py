"""The Dockerfile's steps in a scratch root, and the image that they make: read-only, no root, filtered.

Machines of tests have no engine. Each RUN runs in a separate root with the machine's Python and /usr.
Debian packages are looked up, but not installed. The requirements are linked from this environment, so that
`uv` only checks their versions, and builds and installs ndif.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from ndif.distribution import NAME as DISTRIBUTION
from ndif.host.runtimes import SUPPORTED
from tests.clients.harness import (
    Client,
)
from tests.conftest import NAME
from tests.deploy.container import Root, allow_list_filter, engine_filter, inside, may_make
from tests.deploy.dockerfile import DOCKER, ROOT, Instruction, only, stages
from tests.deploy.profiles import docker_profile, unit_calls
from tests.deploy.test_docker_files import SERVICES
from tests.processes import children
from tests.services.packages import go_without, need
from tests.test_wheel import PACKAGES, VERSION, interpreter, link, required
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

INDEX = "https://pypi.org/simple"
"""The index for torch; test machines reach no other index."""
MODEL = "/models/tiny"
WRITABLE = {"state": "/var/lib/ndif", "cache": "/var/cache/ndif"}
READS = "scenario_reads_of_layers_and_logits"
OUTSIDE = re.compile(r"SSL_CERT_|PIP_CERT|REQUESTS_CA_BUNDLE|\w+_proxy", re.IGNORECASE)
"""Variables by which this machine reaches registries; container engines pass such variables to a build."""
CACHE = re.compile(r"--mount=type=cache,target=(\S+)")


@dataclass
class Image:
    """The root of the image, and its configuration."""

    root: Root
    user: str
    entry: list[str]
    command: list[str]
    health: list[str]
    filters: list[Path]


class Build:
    """The run of a Dockerfile, stage by stage."""

    def __init__(self) -> None:
        self.roots: list[Root] = []
        self.user = "0:0"
        self._variables: dict[str, str] = {}

    def stage(self, instructions: list[Instruction]) -> Root:
        """Run a stage; `--from` means the one before."""
        root = Root.make()
        self.roots.append(root)
        python = interpreter(root.path("/python"))
        root.path("/python/bin").mkdir(parents=True, exist_ok=True)
        copied = python.is_relative_to(root.folder)
        root.path("/python/bin/python").symlink_to(python.name if copied else python)
        if not copied:  # every user can read this machine's Python
            base = python.parents[1]
            root.mounts = {} if base.is_relative_to("/usr") else {base: str(base)}
        root.environment = {
            "PATH": "/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LD_LIBRARY_PATH": "/python/lib",
            "HOME": "/root",
        }
        self._variables = {}
        for instruction in instructions:
            getattr(self, f"_{instruction.name.lower()}", self._note)(root, instruction)
        return root

    def _note(self, root: Root, instruction: Instruction) -> None:
        assert instruction.name in (
            "FROM",
            "LABEL",
            "EXPOSE",
            "STOPSIGNAL",
            "HEALTHCHECK",
            "ENTRYPOINT",
            "CMD",
        )

    def _arg(self, root: Root, instruction: Instruction) -> None:
        self._variables |= instruction.assignments
        if "TORCH_INDEX" in self._variables:
            self._variables["TORCH_INDEX"] = INDEX

    def _env(self, root: Root, instruction: Instruction) -> None:
        for name, value in instruction.assignments.items():
            root.environment[name] = value.replace("$PATH", root.environment["PATH"])

    def _workdir(self, root: Root, instruction: Instruction) -> None:
        root.working_folder = instruction.value
        root.path(instruction.value).mkdir(parents=True, exist_ok=True)

    def _user(self, root: Root, instruction: Instruction) -> None:
        self.user = instruction.value

    def _copy(self, root: Root, instruction: Instruction) -> None:
        *sources, target = instruction.value.split()
        place = root.path(str(Path(root.working_folder, target)))
        if sources[0].startswith("--from="):
            shutil.move(self.roots[-2].path(sources[1]), place)
            return
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, place, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(source, place)

    def _run(self, root: Root, instruction: Instruction) -> None:
        if instruction.command.startswith("apt-get"):
            self._look_up(instruction.command)
            return
        mounts = {}
        for target in CACHE.findall(instruction.value):
            cache = Path("~", Path(target).relative_to("/root")).expanduser()
            cache.mkdir(parents=True, exist_ok=True)
            mounts[cache] = target
        mounts[Path("/etc/resolv.conf").resolve()] = "/etc/resolv.conf"
        shell = ["/bin/sh", "-c", instruction.command]
        passed = {name: value for name, value in os.environ.items() if OUTSIDE.match(name)}
        variables = {**passed, **self._variables}
        root.run(shell, mounts=mounts, variables=variables, user=self.user)
        if "venv /opt/ndif" in instruction.command:
            link_environment(root.path("/opt/ndif"), "server", "science")

    def _look_up(self, command: str) -> None:
        match = re.search(r"--no-install-recommends ([\w .+-]+)", command)
        assert match is not None
        for package in match[1].split():
            process = subprocess.run(
                ["apt-cache", "policy", package], capture_output=True, text=True, check=True
            )
            assert re.search(r"(Installed|Candidate): \d", process.stdout), (
                f"Debian has no {package}"
            )


def link_environment(target: Path, *extras: str) -> None:
    """Link the requirements of a new environment from this one."""
    tops: set[str] = set()
    for name in required(*extras) - {DISTRIBUTION}:
        with contextlib.suppress(metadata.PackageNotFoundError):  # for another Python
            tops |= {file.parts[0] for file in metadata.distribution(name).files or ()}
    packages = target / "lib" / VERSION / "site-packages"
    existing = {entry.name for entry in packages.iterdir()}
    link((PACKAGES / top for top in tops - existing - {"..", "__pycache__"}), packages)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if not may_make():
        go_without("only root makes mount namespaces, where the machine lets it")
    need("tini", "tini")
    need("setpriv", "util-linux")
    folder = tmp_path_factory.mktemp("filters")
    filters = [
        engine_filter(docker_profile(folder), folder / "docker.bpf"),
        allow_list_filter(unit_calls("ndif.service"), folder / "systemd.bpf"),
    ]
    build = Build()
    try:
        for stage in stages():
            root = build.stage(stage)
        entry, command, check = (
            json.loads(only(stage, name)[0].value.partition("[")[1] + _after(stage, name))
            for name in ("ENTRYPOINT", "CMD", "HEALTHCHECK")
        )
        yield Image(root, build.user, entry, command, check, filters)
    finally:
        for root in build.roots:
            root.remove()


def _after(stage: list[Instruction], name: str) -> str:
    return only(stage, name)[0].value.partition("[")[2]


class Running:
    """A container of the image, as `docker run --read-only --cap-drop ALL` makes one."""

    def __init__(self, image: Image, folder: Path, model: Path) -> None:
        self._image = image
        self.state, cache, served = folder / "state", folder / "cache", folder / "model"
        shutil.copytree(model, served)
        for directory in (self.state, cache):
            directory.mkdir()
        number = int(image.user.partition(":")[0])
        for path in (self.state, cache, served, *served.iterdir()):
            os.chown(path, number, number)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = image.root.popen(
            [*image.entry, *image.command, "-v", f"{NAME}={MODEL}"],
            user=image.user,
            mounts={self.state: "/var/lib/ndif", cache: "/var/cache/ndif", served: MODEL},
            variables={
                "NDIF_API_PORT": str(self.port),
                "NDIF_PUBLIC_URL": self.url,
                "COLUMNS": "200",
                "NO_COLOR": "1",
            },
            read_only=True,
            filters=image.filters,
        )
        self.output: deque[str] = deque(maxlen=500)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.output.extend(line.rstrip() for line in self.process.stdout)

    def log(self) -> str:
        return "\n".join(self.output)

    @property
    def first(self) -> int:
        """Number of the container's first process, as this machine counts."""
        return children(self.process.pid)[0]

    def processes(self) -> list[int]:
        """Return all processes of the container."""
        pids, coming = [], [self.first]
        while coming:
            pids.append(coming.pop())
            with contextlib.suppress(OSError):
                coming += children(pids[-1])
        return pids

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        return inside(self.first, self._image.root, command, self._image.user)

    def key(self) -> str:
        """Return the API key that the first start made."""
        lines = (self.state / "sessions" / "client.env").read_text()
        return lines.partition("NDIF_API_KEY=")[2].strip()


@pytest.fixture(scope="module")
def running(
    image: Image, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    running = Running(image, tmp_path_factory.mktemp("container"), tiny_gpt2)

    def is_healthy() -> bool:
        assert running.process.poll() is None, running.log()
        if not children(running.process.pid):
            return False
        return running.execute(*image.health, "--ready").returncode == 0

    try:
        until(is_healthy, running.log)
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def test_client_of_each_generation_traces_against_image(
    image: Image, running: Running, tiny_gpt2: Path, tmp_path: Path
) -> None:
    def trace(generation: str) -> None:
        environment = {
            "NDIF_HOST": running.url,
            "HF_ENDPOINT": f"{running.url}/hub",
            "HF_HOME": str(tmp_path / generation),
            "NDIF_API_KEY": running.key(),
        }
        module = "scenarios_08"
        if generation != "0.8":
            module = "scenarios_headers"
            overlay = image.root.path(f"/opt/ndif/runtimes/{generation}")
            environment["PYTHONPATH"] = str(overlay)
        client = Client(module, NAME, tiny_gpt2, environment)
        try:
            client.run(READS)
        finally:
            client.close()

    with ThreadPoolExecutor(len(SUPPORTED)) as pool:
        list(pool.map(trace, SUPPORTED))


def test_container_processes_cannot_run_as_root(running: Running, image: Image) -> None:
    for pid in running.processes():
        with contextlib.suppress(OSError):  # it has ended
            status = dict(
                line.split(":\t", 1)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if ":\t" in line
            )
            assert set(status["Uid"].split()) == {image.user.partition(":")[0]}
            assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
            assert status["NoNewPrivs"] == "1"
            assert int(status["Seccomp_filters"]) >= len(image.filters)


def test_container_file_system_is_read_only_except_mounts(running: Running) -> None:
    for place in ("/opt/ndif", "/etc", "/var/lib", "/usr", "/models"):
        result = running.execute("touch", f"{place}/new")
        assert result.returncode == 1
        assert "Read-only file system" in result.stderr or "Permission denied" in result.stderr
    for place in ("/tmp", "/var/lib/ndif", "/var/cache/ndif"):
        assert running.execute("touch", f"{place}/new").returncode == 0


def test_doctor_finds_full_sandbox_in_container(running: Running) -> None:
    output = running.execute("ndif", "doctor").stdout
    assert re.search(r"Landlock: files .*ABI", output), output
    assert re.search(r"seccomp: system calls .*an allow-list", output), output


def test_container_stops_gracefully(running: Running, image: Image) -> None:
    """The last test of this container."""
    assert running.execute(*image.health).returncode == 0
    os.kill(running.first, signal.SIGTERM)
    assert running.process.wait(60) == 0, running.log()
    assert "Stopped." in running.log()


def test_image_contains_no_secret_and_no_source(image: Image) -> None:
    assert not image.root.path("/src").exists()
    assert not any("secret" in name.lower() for name in image.root.environment if "DIR" not in name)
    text = shlex.join([*image.entry, *image.command]) + (DOCKER / "Dockerfile").read_text()
    assert "PASSWORD" not in text


def test_ray_head_of_compose_runs_in_image(image: Image, tmp_path: Path) -> None:
    folders = {tmp_path / name: target for name, target in WRITABLE.items()}
    number = int(image.user.partition(":")[0])
    for folder in folders:
        folder.mkdir()
        os.chown(folder, number, number)
    secrets = tmp_path / "secrets"
    subprocess.run(["sh", DOCKER / "make-secrets.sh", secrets], check=True)
    # Each file is mounted, so the user needs no access to its folder.
    mounts = {secrets / name: f"/run/secrets/{name}" for name in SERVICES["ray"]["secrets"]}
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    variables = {
        name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))
        for name, value in SERVICES["ray"]["environment"].items()
    }
    variables |= {"NDIF_RAY_ADDRESS": address, "NDIF_NODE_CPU_MEMORY": "1GiB"}
    process = image.root.popen(
        [*image.entry, *SERVICES["ray"]["command"]],
        user=image.user,
        mounts={**folders, **mounts},
        variables=variables,
        read_only=True,
        filters=image.filters,
    )

    def is_healthy() -> bool:
        assert process.poll() is None, process.communicate()[0]
        if not children(process.pid):
            return False
        check = inside(children(process.pid)[0], image.root, image.health, image.user)
        return check.returncode == 0

    try:
        until(is_healthy)
        os.kill(children(process.pid)[0], signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
