"""A server of many processes before models that take no time: `python -m bench.noop.host FOLDER`.

What it needs elsewhere say the variables of its environment. It prints its port once it answers.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import uvloop

from ndif.gateway.serving import answers
from ndif.schema.deployment import DeploymentConfig
from ndif.server.part import Part
from ndif.server.supervisor import Module, Supervisor

HOST = "127.0.0.1"
GATEWAYS = 2


async def serve(folder: Path) -> None:
    """Serve until told to stop."""
    with socket.create_server((HOST, 0), backlog=128) as listening:
        port = listening.getsockname()[1]
        config = DeploymentConfig("bench/nothing", str(folder), dedicated=True, replicas=2)
        part = Part(listening.fileno(), folder, "a secret", "a token", True, [config])
        leader = Module("dispatcher", "bench.noop.lead", folder / "dispatcher.log", gives_up=False)
        gateways = [
            Module(f"gateway {n}", "ndif.server.worker", folder / "gateways.log", gives_up=True)
            for n in range(GATEWAYS)
        ]
        supervisor = Supervisor([leader, *gateways], part, folder)
        await supervisor.run(lambda: answers(HOST, port), lambda: print(port, flush=True))


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
