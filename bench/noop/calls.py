"""The throughput of Ray alone: `python -m bench.noop.calls ADDRESS` prints its calls a second.

Two actors answer small calls; each gets the next call once it has answered.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import ray
import uvloop

_ACTORS = 2
_WARM_UP, _CALLS = 200, 2000
_QUESTION = bytes(700)


class Echo:
    """A minimal actor."""

    async def run(self, content: bytes) -> dict[str, object]:
        """Answer as a replica does."""
        return {"status": "COMPLETED", "description": "", "delivered": True}


async def rate(address: str) -> float:
    """Return the calls a second."""
    ray.init(address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    kind = ray.remote(Echo).options(num_cpus=0, max_concurrency=100)
    actors = [kind.remote() for _ in range(_ACTORS)]

    async def ask(actor: ray.actor.ActorHandle, times: int) -> None:
        for _ in range(times):
            await actor.run.remote(_QUESTION)

    for times in (_WARM_UP, _CALLS):
        began = time.perf_counter()
        await asyncio.gather(*(ask(actor, times // _ACTORS) for actor in actors))
        took = time.perf_counter() - began
    return _CALLS / took


if __name__ == "__main__":
    print(uvloop.run(rate(sys.argv[1])))
