"""The wheel in a separate environment with only its requirements, for a user other than root."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import site
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ndif.distribution import NAME as DISTRIBUTION
from tests.clients.harness import Client, LocalServer
from tests.conftest import NAME, client_environment
from tests.waiting import until

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
PACKAGES = Path(site.getsitepackages()[0])
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
NOBODY = "nobody"
READS = "scenario_reads_of_layers_and_logits"


def required(*extras_of_ours: str) -> set[str]:
    """Return the names of all distributions that the wheel requires with these extras."""
    keys: set[str] = set()
    coming: list[tuple[str, frozenset[str]]] = [(DISTRIBUTION, frozenset(extras_of_ours))]
    while coming:
        name, extras = coming.pop()
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is not None and not any(
                marker.evaluate({"extra": extra}) for extra in extras or {""}
            ):
                continue
            key = canonicalize_name(requirement.name)
            if key not in keys or requirement.extras:
                coming.append((requirement.name, frozenset(requirement.extras)))
            keys.add(key)
    return keys


def is_reachable(folder: Path) -> bool:
    """Return True if every user can enter a folder."""
    return all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))


def link(sources: Iterable[Path], target: Path) -> None:
    """Copy files and folders into a folder, by hard links if possible."""
    target.mkdir(parents=True, exist_ok=True)
    places = [*map(str, sources), str(target)]
    if subprocess.run(["cp", "-al", *places], capture_output=True).returncode != 0:
        subprocess.run(["cp", "-a", *places], check=True)


@dataclass
class Installed:
    """An environment with only the wheel and its requirements."""

    folder: Path
    environment: dict[str, str]
    user: str | None
    """The user of its programs; None for the tests' own user, if that is not root."""

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    def popen(self, *command: str | Path) -> subprocess.Popen[str]:
        """Start a program as `user`."""
        return subprocess.Popen(
            command,
            user=self.user,
            group=None if self.user is None else pwd.getpwnam(self.user).pw_gid,
            extra_groups=None if self.user is None else [],
            cwd=self.folder / "home",
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str | Path) -> str:
        """Run a program as `user` to its end; return its output."""
        process = self.popen(*command)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output


def interpreter(folder: Path) -> Path:
    """Return a Python of this version that every user can run: this one, or a copy in `folder`."""
    base = Path(sys.base_prefix)
    if is_reachable(base):
        return base / "bin" / VERSION
    link([base / "bin" / VERSION], folder / "bin")
    library = base / "lib" / VERSION
    needless = {"site-packages", "test", "idlelib"}
    link(
        (entry for entry in library.iterdir() if entry.name not in needless),
        folder / "lib" / VERSION,
    )
    link((base / "lib").glob("libpython*"), folder / "lib")
    return folder / "bin" / VERSION


@pytest.fixture(scope="module")
def installed() -> Iterator[Installed]:
    user = NOBODY if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="ndif-wheel-"))
    folder.chmod(0o755)
    try:
        build = [Path(sys.executable).with_name("uv"), "build", "--quiet", "--wheel"]
        subprocess.run([*build, "--out-dir", folder, ROOT], check=True)
        python = interpreter(folder / "python")
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder / "home"),
            "LD_LIBRARY_PATH": str(folder / "python" / "lib"),
            "COLUMNS": "200",
            "NO_COLOR": "1",
        }
        venv = [python, "-m", "venv", "--without-pip", folder / "venv"]
        subprocess.run(venv, check=True, env=environment)
        packages = folder / "venv" / "lib" / VERSION / "site-packages"
        tops: set[str] = set()
        for name in (*required(), "pip"):
            with contextlib.suppress(metadata.PackageNotFoundError):  # for another Python
                files = metadata.distribution(name).files or ()
                tops |= {file.parts[0] for file in files}
        link((PACKAGES / top for top in tops - {"..", "__pycache__"}), packages)
        (folder / "home").mkdir()
        if user is not None:
            owner = pwd.getpwnam(user)
            for own in ("home", "venv", "venv/bin", str(packages.relative_to(folder))):
                os.chown(folder / own, owner.pw_uid, owner.pw_gid)
        machine = Installed(folder, environment, user)
        pip = [machine.bin / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        machine.run(*pip, *folder.glob("*.whl"))
        yield machine
    finally:
        # Tens of thousands of files; no other test waits for their removal.
        subprocess.Popen(["rm", "-rf", folder])


class WheelServer(LocalServer):
    """A server with the wheel's program."""

    def __init__(self, installed: Installed, *arguments: str | Path) -> None:
        self._installed = installed
        super().__init__(*map(str, arguments), environment={})

    def _popen(self, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
        return self._installed.popen(self._installed.bin / "ndif", *arguments)


def test_local_and_full_server_of_wheel_run_without_root(
    installed: Installed, tiny_gpt2: Path, tmp_path: Path
) -> None:
    model = installed.folder / "model"
    shutil.copytree(tiny_gpt2, model)
    for file in model.iterdir():
        file.chmod(0o644)  # only the owner can read written weights
    assert installed.run(installed.bin / "ndif", "version") == f"{metadata.version(DISTRIBUTION)}\n"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sizes = [
        WheelServer(installed, "local", "start", model, "--name", NAME, "--sandbox"),
        WheelServer(installed, "start", f"{NAME}={model}", "--port", str(port), "-v"),
    ]
    try:

        def trace(server: LocalServer) -> None:
            home = tmp_path / server.ready().url.rpartition(":")[2]
            environment = client_environment(server, home, None)
            if server is sizes[1]:  # without configuration, the first start has made a key
                lines = (installed.folder / "home" / ".ndif" / "client.env").read_text()
                environment["NDIF_API_KEY"] = lines.partition("NDIF_API_KEY=")[2].strip()
                assert environment["NDIF_API_KEY"]
            # Clients build their model from the server's files once the server has them.
            until(lambda: server.get(f"/hub/api/models/{NAME}")[0] == 200)
            client = Client("scenarios_08", NAME, tiny_gpt2, environment)
            client.run(READS)
            client.close()
            status, page = server.get("/")
            assert status == 200
            (style,) = re.findall(r'href="(/static/\w+/style.css)"', page.decode())
            assert server.get(style)[0] == 200

        with ThreadPoolExecutor(len(sizes)) as pool:
            list(pool.map(trace, sizes))
        if installed.user is not None:
            owner = pwd.getpwnam(installed.user).pw_uid
            assert {Path(f"/proc/{size.process.pid}").stat().st_uid for size in sizes} == {owner}
    finally:
        for size in sizes:
            size.stop()
