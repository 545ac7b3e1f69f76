"""A gateway without a leader: its jobs never run.

Usage: python -m bench.servers.accounts FOLDER [DATABASE]; prints its port.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import uvicorn
import uvloop

from ndif.config.settings import Settings
from ndif.schema.deployment import DeploymentConfig
from ndif.server.embedded import Operator, Server


async def serve(folder: Path, database: str) -> None:
    """Serve until killed, with the keys of a database, or without keys."""
    settings = Settings(dev_mode=not database, database_url=database)
    config = DeploymentConfig("bench/nothing", str(folder), dedicated=True)
    server = Server(settings, [config], folder, Operator(), host="127.0.0.1")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        print(listening.getsockname()[1], flush=True)
        served = server.uvicorn_config(listening)
        served.lifespan = "off"
        await uvicorn.Server(served).serve(sockets=[listening])


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), "".join(sys.argv[2:])))
