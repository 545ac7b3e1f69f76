"""Configuration that the supervising process hands to the gateways and the dispatcher, and their set-up."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ndif.net import local_url
from ndif.schema.deployment import DeploymentConfig
from ndif.server.supervised import ProcessSpec
from ndif.stores.accounts import probe_key_of
from ndif.stores.disk import open_private
from ndif.telemetry import metrics_folder

GATEWAY_MODULE, LEADER_MODULE = "ndif.server.gateway_process", "ndif.server.leader"
_UP = "up-"


@dataclass(frozen=True)
class ProcessConfig:
    """Configuration that all processes of one server share, beside the environment.

    It travels in a file that only this user can read, because it holds secrets.
    """

    listening: int
    """Descriptor of the socket that the gateways share: while one starts again, the others answer."""
    results: Path
    """Folder of results, where no object store is configured."""
    secret: str
    """Key that signs the addresses of results in files."""
    token: str
    """Bearer token of `/admin/*`."""
    host: str
    """Name or address that the server listens on."""
    deployments: Sequence[DeploymentConfig]
    admin: int | None = None
    """Descriptor of the socket of the operator's routes, if they have one; gateways share it, too."""
    broker_url: str = ""
    """URL of the broker with its password, if the server started it; else empty, see the settings."""
    cluster_secrets: Sequence[str] = ()
    """Secrets of a server with a broker: the first signs the messages between its processes."""
    ray_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables by which Ray finds the token of its cluster."""

    def write(self, path: Path) -> None:
        """Write the configuration for `read`, with mode 0600."""
        content = {**asdict(self), "results": str(self.results)}
        with open_private(path) as file:
            json.dump(content, file)

    @classmethod
    def read(cls, path: Path) -> ProcessConfig:
        """Return the configuration that `write` wrote."""
        content = json.loads(path.read_text())
        content["results"] = Path(content["results"])
        content["deployments"] = [DeploymentConfig(**config) for config in content["deployments"]]
        return cls(**content)

    @property
    def probe_keys(self) -> tuple[str, ...]:
        """Return the API keys of probes; other hosts of the server, if any, also know the first.

        Each host has a token of its own, and a probe may come to another host's gateway.
        """
        return tuple(map(probe_key_of, (*self.cluster_secrets, self.token)))

    def url(self) -> str:
        """Return the address of the gateways on this machine, in a process that has their socket."""
        with socket.socket(fileno=os.dup(self.listening)) as listening:
            return local_url(*listening.getsockname()[:2])

    def processes(
        self,
        file: Path,
        gateways: int,
        log: Path,
        leader_log: Path,
        leader_module: str = LEADER_MODULE,
    ) -> list[ProcessSpec]:
        """Return the processes of a server, which read their configuration from `file`."""
        environment = {**os.environ, **metrics_folder.prepare(file.parent / "metrics")}

        def process(name: str, module: str, log: Path, *, must_start: bool) -> ProcessSpec:
            def command(parent_pipe: int) -> Sequence[str]:
                return [sys.executable, "-m", module, str(file), str(parent_pipe)]

            inherited = (self.listening, *(() if self.admin is None else (self.admin,)))
            return ProcessSpec(
                name, command, log, must_start, inherited=inherited, environment=environment
            )

        names = [f"gateway {number}" for number in range(gateways)]
        return [
            # A dispatcher that cannot reach the broker or the cluster yet tries again.
            process("dispatcher", leader_module, leader_log, must_start=False),
            *(process(name, GATEWAY_MODULE, log, must_start=True) for name in names),
        ]


def announce_up(file: Path) -> None:
    """Note beside the configuration in `file` that this process serves; `came_up` reads the note."""
    (file.parent / f"{_UP}{os.getpid()}").touch()


def came_up(folder: Path, pid: int, since: float) -> bool:
    """Return True if a process has served since that Unix time, given the folder of its configuration."""
    try:
        return (folder / f"{_UP}{pid}").stat().st_mtime >= since
    except FileNotFoundError:
        return False


def on_parent_exit(parent_pipe: int, stop: Callable[[], None]) -> None:
    """Call `stop` once the supervising process has closed its end of the pipe, or is gone."""
    loop = asyncio.get_running_loop()

    def closed() -> None:
        loop.remove_reader(parent_pipe)
        stop()

    loop.add_reader(parent_pipe, closed)
