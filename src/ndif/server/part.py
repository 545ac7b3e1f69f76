"""What a process of a server of many is told by the one that starts it, in a file that only they read."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ndif.schema.deployment import DeploymentConfig

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TALKATIVE = ("httpx", "httpcore")


@dataclass(frozen=True)
class Part:
    """The part that a process has in a server."""

    listening: int
    """The descriptor of the socket that gateways share."""
    results: Path
    secret: str
    """With which addresses of results in files are signed."""
    token: str
    loopback: bool
    deployments: Sequence[DeploymentConfig]

    def write(self, path: Path) -> None:
        """For `read`, by another process of this user."""
        said: dict[str, Any] = {
            "listening": self.listening,
            "results": str(self.results),
            "secret": self.secret,
            "token": self.token,
            "loopback": self.loopback,
            "deployments": [asdict(config) for config in self.deployments],
        }
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(said, file)

    @classmethod
    def read(cls, path: Path) -> Part:
        """What was written."""
        said = json.loads(path.read_text())
        said["results"] = Path(said["results"])
        said["deployments"] = [DeploymentConfig(**config) for config in said["deployments"]]
        return cls(**said)


def on_hang_up(lifeline: int, then: Callable[[], None]) -> None:
    """Call `then` once the process that started this one is gone, or wants it to end."""
    loop = asyncio.get_running_loop()

    def hang_up() -> None:
        loop.remove_reader(lifeline)
        then()

    loop.add_reader(lifeline, hang_up)


def log_to_stderr() -> None:
    """Whoever started this process keeps what it says."""
    logging.basicConfig(level=logging.INFO, format=_FORMAT, force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
