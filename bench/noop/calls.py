"""The throughput of Ray alone: calls a second.

Usage: python -m bench.noop.calls ADDRESS; prints a number for each line that it reads.
Two actors answer small calls; each gets its next call after its answer.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence

import ray
import uvloop
from ray.actor import ActorHandle

_ACTORS = 2
_CALLS = 1000
_QUESTION = bytes(700)


class Echo:
    """A minimal actor."""

    async def run(self, content: bytes) -> dict[str, object]:
        """Return an answer like a replica's."""
        return {"status": "COMPLETED", "description": "", "delivered": True}


async def rate(actors: Sequence[ActorHandle]) -> float:
    """Return the number of calls per second."""

    async def ask(actor: ActorHandle) -> None:
        for _ in range(_CALLS // len(actors)):
            await actor.run.remote(_QUESTION)

    began = time.perf_counter()
    await asyncio.gather(*map(ask, actors))
    return _CALLS / (time.perf_counter() - began)


async def serve(address: str) -> None:
    """Measure once for each line of the input."""
    ray.init(address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    kind = ray.remote(Echo).options(num_cpus=0, max_concurrency=100)
    actors = [kind.remote() for _ in range(_ACTORS)]
    while await asyncio.to_thread(sys.stdin.readline):
        print(await rate(actors), flush=True)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
