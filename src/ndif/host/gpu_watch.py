"""Watches GPU memory of replicas that share a GPU: torch's own cap holds for one process, not for all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndif.host.gpus import Driver, DriverError, Gpu

logger = logging.getLogger(__name__)

_EVERY_S = 0.5
_FRESH_S = 0.25
_MISSES = 20
"""Looks at a living runner of which the driver names nothing, until it counts as one that cannot."""
SLACK = 256 << 20
"""Bytes that a request may take beyond the share: contexts are counted by a guess."""


@dataclass(frozen=True, slots=True)
class Held:
    """GPU memory of one replica on one device."""

    runner_bytes: int
    """Of the runner that is watched."""
    replica_bytes: int
    """Of all its processes."""


def held(used: Mapping[int, int | None], runner: int, zygote: int) -> Held | None:
    """Add up what a replica's processes hold of a device.

    None if the driver names none of them: a container may not see the process ids that the driver uses, and
    some drivers do not tell what a process holds.
    """
    mine = {pid: size for pid, size in used.items() if size is not None and _is_of(pid, zygote)}
    return Held(mine.get(runner, 0), sum(mine.values())) if mine else None


def _is_of(pid: int, zygote: int) -> bool:
    """Return True for a replica's owner and its runners, which its zygote has forked."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name before may have any letters in it.
    return int(stat.rpartition(")")[2].split()[1]) == zygote


def exceeded(share: int, before: Held, now: Held) -> str | None:
    """Say what to tell the user of a request that took a GPU beyond its model's share; None if it did not.

    What was beyond the share before the request is not its fault.
    """
    grown = now.runner_bytes - before.runner_bytes
    if grown <= SLACK or now.replica_bytes <= max(share, before.replica_bytes) + SLACK:
        return None
    return (
        f"The request took {grown:,} bytes of GPU memory, and with them the model holds more than the "
        f"{share:,} bytes that it has of a GPU which it shares with others. It was ended. Compute less at "
        "once: shorter or fewer prompts, or fewer tensors kept on the GPU."
    )


class GpuWatch:
    """Watch the requests of a machine's replicas.

    Asks the driver what processes hold, once for all who want to know at the same time. Where the driver
    does not tell, it says so once, and watches nothing.
    """

    def __init__(
        self, driver: Driver, gpus: Sequence[Gpu], sizes: Sequence[int], every_s: float = _EVERY_S
    ) -> None:
        """`gpus` and `sizes`: the GPUs of the machine, and the bytes of each that replicas may take."""
        self._driver = driver
        self._gpus = gpus
        self._sizes = sizes
        self._every_s = every_s
        self._sample: tuple[float, Mapping[str, Mapping[int, int | None]]] = (-1.0, {})
        self._sampling = asyncio.Lock()
        self._is_blind = False

    async def over(
        self, runner: int, zygote: int, shares: Mapping[int, int], end: Callable[[str], None]
    ) -> None:
        """Call `end` with the reason once process `runner` takes its replica beyond its share.

        `shares`: bytes that the replica holds of each GPU, by index. Of one that is all its own there is no
        beyond.
        """
        shared = {i: share for i, share in shares.items() if share < self._sizes[i]}
        before: dict[int, Held] = {}
        missed = 0
        while shared and not self._is_blind:
            try:
                sample = await self._used()
            except DriverError as error:
                self._cannot(str(error))
                return
            for index, share in shared.items():
                now = held(sample.get(self._gpus[index].uuid, {}), runner, zygote)
                if now is None:
                    # Of a replica that is ending nothing is named either, nor of a card that is busy.
                    missed += 1
                    if missed >= _MISSES and _lives(runner):
                        self._cannot("the driver names none of a replica's processes")
                        return
                    continue
                if reason := exceeded(share, before.setdefault(index, now), now):
                    end(reason)
                    return
            await asyncio.sleep(self._every_s)

    async def _used(self) -> Mapping[str, Mapping[int, int | None]]:
        async with self._sampling:
            taken, _ = self._sample
            if time.monotonic() - taken > min(_FRESH_S, self._every_s):
                self._sample = time.monotonic(), await self._asked()
            return self._sample[1]

    async def _asked(self) -> Mapping[str, Mapping[int, int | None]]:
        """Ask the driver, whose answer is waited for to its end though nobody may want it any more."""
        return await asyncio.shield(asyncio.ensure_future(self._driver.processes()))

    def _cannot(self, why: str) -> None:
        if not self._is_blind:
            self._is_blind = True
            logger.warning(
                "what requests take of a shared GPU is not watched: %s. Their processes are held by "
                "torch's own cap alone",
                why,
            )


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
