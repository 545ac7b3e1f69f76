"""A server of many processes whose models do nothing: `python -m bench.noop.host FOLDER`.

Environment variables name its services. It prints its port once it answers.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import uvloop

from ndif.net import STOP_SIGNALS, is_serving
from ndif.schema.deployment import DeploymentConfig
from ndif.server.process_config import ProcessConfig
from ndif.server.supervised import Supervisor

HOST = "127.0.0.1"
GATEWAYS = 2
TOKEN = "a token"


async def serve(folder: Path) -> None:
    """Serve until a signal."""
    stopping = asyncio.Event()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with socket.create_server((HOST, 0), backlog=128) as listening:
        port = listening.getsockname()[1]
        checkpoint = (
            folder / "checkpoint"
        )  # a separate folder: the server's folder holds its secrets
        checkpoint.mkdir(exist_ok=True)
        deployment = DeploymentConfig("bench/nothing", str(checkpoint), dedicated=True, replicas=2)
        config = ProcessConfig(
            listening.fileno(),
            folder,
            "a secret",
            TOKEN,
            HOST,
            [deployment],
            cluster_secrets=["a secret of the benchmarks"],
        )
        file = folder / "config.json"
        config.write(file)
        processes = config.processes(
            file, GATEWAYS, folder / "gateways.log", folder / "dispatcher.log", "bench.noop.lead"
        )
        supervisor = Supervisor(stopping)
        try:
            await supervisor.start(processes, lambda: is_serving(HOST, port))
            if not stopping.is_set():
                print(port, flush=True)
                await supervisor.wait()
        finally:
            await supervisor.stop()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
