"""The path of one warm request through the server's files: `python -m bench.walk`.

A server of one process, whose model does nothing, serves requests of nnsight 0.8 until it is warm. A
profiler then records all calls of some requests, one request at a time. The program prints the files of
ndif with at least one call in every request, in the order of their first call. Telemetry, schema,
settings and host names are listed separately.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

import ndif
from bench.clients.user import User
from bench.noop import NoopRuntimes
from ndif.config.settings import Settings
from ndif.net import Http, listen
from ndif.schema.deployment import DeploymentConfig
from ndif.server.embedded import Operator, Server

_HOST = "127.0.0.1"
_WARM, _SEEN = 20, 5
_SOURCE = str(Path(ndif.__file__).parent) + "/"
_APART = ("telemetry/", "schema/", "config/", "hostname.py")


class Walk:
    """The calls of one thread, by file."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}
        """The names of the functions called, by file, in the order of the first calls."""
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; the signature is the one of `sys.setprofile`."""
        if event == "call" and frame.f_code.co_filename.startswith(_SOURCE):
            functions = self.files.setdefault(frame.f_code.co_filename.removeprefix(_SOURCE), [])
            self.calls += 1
            if frame.f_code.co_name not in functions:
                functions.append(frame.f_code.co_name)


def walk(port: int, loop: asyncio.AbstractEventLoop) -> Walk:
    """Send requests to the server that `loop` runs; return the files and calls that all have in common."""
    walks = [Walk() for _ in range(_SEEN)]

    async def send() -> None:
        user = User(port)
        await user.connect()
        for _ in range(_WARM):
            await user.run()
        for recorded in walks:
            loop.call_soon_threadsafe(sys.setprofile, recorded)
            await user.run()
            loop.call_soon_threadsafe(sys.setprofile, None)
            await asyncio.sleep(0.2)  # updates and records of the previous request
        user.close()

    asyncio.run(send())
    last = walks[-1]
    common = set(last.files).intersection(*(recorded.files for recorded in walks))
    last.files = {name: names for name, names in last.files.items() if name in common}
    return last


def show(common: Walk) -> None:
    """Print the walk."""
    counted = {name: names for name, names in common.files.items() if not name.startswith(_APART)}
    for name, functions in counted.items():
        print(f"{name:40} {', '.join(functions)}")
    print(f"{len(counted)} files; beside them {len(common.files) - len(counted)}: ", end="")
    print(", ".join(name for name in common.files if name not in counted))
    print(f"{common.calls} calls")


async def _serve(folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    server = Server(
        Settings(dev_mode=True, runtimes_dir=folder),
        [DeploymentConfig("bench/nothing", str(checkpoint), dedicated=True)],
        folder / "results",
        Operator(),
        host=_HOST,
        runtimes=NoopRuntimes(folder, 1 << 20),
    )
    loop = asyncio.get_running_loop()
    with listen(_HOST, 0) as listening:
        port = listening.getsockname()[1]

        def ready() -> None:
            threading.Thread(target=measure, daemon=True).start()

        def measure() -> None:
            try:
                show(walk(port, loop))
            finally:
                loop.call_soon_threadsafe(http.stop)

        http = Http(server.uvicorn_config(listening), ready, server.farewell)
        await http.serve(sockets=[listening])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        uvloop.run(_serve(Path(temporary)))
