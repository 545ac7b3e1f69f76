"""The real server with no-op model processes: `python -m bench.control_server FOLDER` prints its port."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import uvicorn
import uvloop

from bench.noop import NoopRuntimes
from ndif.config.settings import Settings
from ndif.schema.deployment import DeploymentConfig
from ndif.server.embedded import Server


async def serve(folder: Path) -> None:
    """Serve until killed."""
    config = DeploymentConfig("bench/nothing", str(folder), dedicated=True)
    server = Server(
        Settings(),
        [config],
        folder,
        host="127.0.0.1",
        places=False,
        trusted=True,
        runtimes=NoopRuntimes(folder),
    )
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        for hosted in await server.bring_up("0.8"):
            await hosted.up()
        print(listening.getsockname()[1], flush=True)
        await uvicorn.Server(server.uvicorn_config(listening)).serve(sockets=[listening])


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
