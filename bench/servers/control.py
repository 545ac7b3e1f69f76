"""A server like `ndif start` on one machine, with models that do nothing.

Usage: python -m bench.servers.control FOLDER PORT [MODELS]; a server's environment variables configure it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import uvloop

from bench.noop import NoopRuntimes
from ndif.config.settings import Settings
from ndif.net import Http, listen
from ndif.schema.deployment import DeploymentConfig
from ndif.server.embedded import Operator, Server
from ndif.telemetry import logs

_HOST = "127.0.0.1"
_SIZE = 1 << 20


async def serve(folder: Path, port: int, models: int) -> None:
    """Serve until a signal."""
    settings = Settings()
    logs.configure("server", settings, [logging.FileHandler(folder / "server.log")])
    checkpoint = folder / "checkpoint"  # a separate folder: the server's folder holds its secrets
    checkpoint.mkdir()
    # `bench.clients.user.KEY` is the key of the first model.
    names = ["bench/nothing", *(f"bench/nothing-{number}" for number in range(1, models))]
    server = Server(
        settings,
        [DeploymentConfig(name, str(checkpoint), dedicated=True) for name in names],
        folder / "results",
        Operator("a token"),
        host=_HOST,
        secret="a secret",
        runtimes=NoopRuntimes(folder, _SIZE),
    )
    with listen(_HOST, port) as listening:
        http = Http(server.uvicorn_config(listening), farewell=server.farewell)
        await http.serve(sockets=[listening])


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int("".join(sys.argv[3:]) or 1)))
