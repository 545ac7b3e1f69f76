"""A Ray Serve deployment that does nothing, with Ray Serve's default settings.

Usage: python -m bench.servers.ray_serve FOLDER PORT
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

_MEMORY = 80 << 20
"""Size of Ray's object store, which this program does not use."""


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Nothing:
    """A model that does nothing."""

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Read a request, and answer."""
        await request.body()
        return {}


def main(folder: str, port: int) -> None:
    """Serve until a signal."""
    stopping = threading.Event()
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=_MEMORY,
        _temp_dir=folder,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Nothing.bind())
    stopping.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
