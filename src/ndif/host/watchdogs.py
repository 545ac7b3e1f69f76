"""Watchdogs of running requests: their memory and threads, and the memory of replicas that share a GPU.

No kernel limit counts memory and threads per process. Torch limits the GPU memory of each process, not the
sum of a replica's processes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ndif.host.gpus import Driver, DriverError, Gpu
from ndif.host.runner_protocol import LimitReason
from ndif.sandbox.confinement.cgroup import CgroupError, RunnerCgroups
from ndif.sizes import format_size
from ndif.tasks import within

logger = logging.getLogger(__name__)

_EVERY_S = 0.05
_MEMORY_FIELDS = ("RssAnon", "RssShmem", "VmSwap", "HugetlbPages", "VmPTE")
"""Fields of /proc/PID/status; the pages of files are not among them."""
_SAMPLE_LIFETIME_S = 0.25
_FIRST_S = 0.5
"""Seconds that a request waits, before it begins, for the driver's report of the memory in use."""
_MAX_MISSES = 20
"""Samples without any process of a live replica, after which the driver counts as unable to name them."""
SLACK = 256 << 20
"""Bytes that a request may take beyond the share, because the size of contexts is an estimate."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """The memory and threads of a process."""

    memory_bytes: int
    """Memory that the kernel cannot take back: anonymous, shared, swapped out, huge pages, page tables."""
    threads: int

    @classmethod
    def of(cls, pid: int) -> ResourceUsage | None:
        """Return the usage of process `pid`; None if it does not exist."""
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return None
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if "RssAnon" not in fields:
            return None  # the process is ending
        # A kernel without swap or huge pages has no field for them.
        kibibytes = sum(int(fields[name].split()[0]) for name in _MEMORY_FIELDS if name in fields)
        return cls(kibibytes << 10, int(fields["Threads"]))


@dataclass(frozen=True, slots=True)
class ResourceWatchdog:
    """The limits of a request's threads, and of its memory beyond its runner's memory at the start."""

    memory_bytes: int
    max_threads: int
    find_cgroups: Callable[[], RunnerCgroups | None] = lambda: None
    """Return cgroups that enforce the same limits; None if this server can make none."""

    def exceeded(self, before: ResourceUsage, now: ResourceUsage) -> LimitReason | None:
        """Return the message for the user of a request that exceeds a limit; None if it does not."""
        if now.memory_bytes - before.memory_bytes > self.memory_bytes:
            return LimitReason(
                f"The request took more than {format_size(self.memory_bytes)} of memory, the most that "
                "this server gives to one (NDIF_RUNNER_MEMORY_BYTES), and was ended. Compute less at "
                "once: a smaller batch, or `with torch.no_grad():` if you need no gradients.",
                "memory",
            )
        if now.threads > self.max_threads:
            return LimitReason(
                f"The request started more than {self.max_threads} threads, the most that this server "
                "gives to one (NDIF_RUNNER_MAX_THREADS), and was ended.",
                "threads",
            )
        return None

    async def enforce(self, pid: int, end: Callable[[str], None]) -> None:
        """Call `end` with the reason if process `pid` exceeds a limit; return when it has ended."""
        before = ResourceUsage.of(pid)
        cgroups = self.find_cgroups()
        if before is not None and cgroups is not None:
            # The cgroup also counts the threads that exist already.
            limits = (self.memory_bytes, before.threads + self.max_threads)
            try:
                # The kernel may take a while to move a process.
                await asyncio.to_thread(cgroups.place, pid, *limits)
            except OSError as error:
                logger.warning("process %d has no cgroup of its own: %s", pid, error)
        while before is not None and (now := ResourceUsage.of(pid)) is not None:
            if reason := self.exceeded(before, now):
                end(reason)
                return
            await asyncio.sleep(_EVERY_S)


@functools.cache
def runner_cgroups() -> RunnerCgroups | None:
    """Return the cgroups below this server's own, prepared; None if it can make none."""
    try:
        cgroups = RunnerCgroups.find()
        cgroups.prepare()
    except (CgroupError, OSError):
        return None  # `ndif doctor` says why
    return cgroups


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """The GPU memory of one replica on one device."""

    runner_bytes: int
    replica_bytes: int


def usage_of(used: Mapping[int, int | None], runner: int, zygote: int) -> GpuUsage | None:
    """Return the memory of a replica's processes on a device; None if the driver names no such process.

    A container may not see the driver's process ids, and some drivers do not report processes' memory.
    """
    own = {pid: size for pid, size in used.items() if size is not None and _is_child(pid, zygote)}
    return GpuUsage(own.get(runner, 0), sum(own.values())) if own else None


def _is_child(pid: int, zygote: int) -> bool:
    """Return True if a process is a child of the zygote: the weight owner or a runner."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The process name in front may contain any characters.
    return int(stat.rpartition(")")[2].split()[1]) == zygote


def exceeded(share: int, before: GpuUsage, now: GpuUsage) -> LimitReason | None:
    """Return the message for the user of a request that takes a GPU beyond its model's share, else None.

    Memory that was beyond the share before the request does not count.
    """
    grown = now.runner_bytes - before.runner_bytes
    if grown <= SLACK or now.replica_bytes <= max(share, before.replica_bytes) + SLACK:
        return None
    return LimitReason(
        f"The request took {format_size(grown)} of GPU memory, and with it the model holds more than the "
        f"{format_size(share)} that it has of a GPU which it shares with others. It was ended. Compute "
        "less at once: shorter or fewer prompts, fewer tensors kept on the GPU, or `with "
        "torch.no_grad():` if you need no gradients.",
        "gpu_memory",
    )


@dataclass(eq=False)
class GpuWatch:
    """A watchdog that ends requests which take a shared GPU beyond their model's share.

    Samples the driver once for all requests that run at the same time. If the driver does not report the
    memory of processes, it logs one warning and watches nothing.
    """

    driver: Driver
    gpus: Sequence[Gpu]
    sizes: Sequence[int]
    """Bytes of each GPU that replicas may take."""
    interval_s: float = 0.5
    _sample: tuple[float, Mapping[str, Mapping[int, int | None]]] = (-1.0, {})
    _sampling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_blind: bool = False

    async def before(
        self, runner: int, zygote: int, shares: Mapping[int, int]
    ) -> dict[int, GpuUsage]:
        """Return a replica's usage of each shared GPU before a request begins on `runner`; see `enforce`.

        A GPU without a timely report of the driver is left out.
        """
        shared = self._shared(shares)
        if not shared or self._is_blind:
            return {}
        try:
            sample = await within(self._current_sample(0.0), _FIRST_S)
        except (DriverError, asyncio.TimeoutError):  # `enforce` logs it
            return {}
        usages = {index: self._usage(sample, index, runner, zygote) for index in shared}
        return {index: usage for index, usage in usages.items() if usage is not None}

    async def enforce(
        self,
        runner: int,
        zygote: int,
        shares: Mapping[int, int],
        before: dict[int, GpuUsage],
        end: Callable[[str], None],
    ) -> None:
        """Call `end` with the reason if process `runner` takes its replica beyond its share.

        `shares` are the bytes of each GPU, by index, that the replica of `zygote` may take, and `before` is
        its usage before the request. A GPU that the replica does not share is not watched.
        """
        shared = self._shared(shares)
        missed = 0
        while shared and not self._is_blind:
            try:
                sample = await self._current_sample(min(_SAMPLE_LIFETIME_S, self.interval_s))
            except DriverError as error:
                self._stop(str(error))
                return
            for index, share in shared.items():
                now = self._usage(sample, index, runner, zygote)
                if now is None:
                    # The driver also names no process of an ending replica or on a busy GPU.
                    missed += 1
                    if missed >= _MAX_MISSES and _is_child(runner, zygote):
                        self._stop("the driver names no process of a replica")
                        return
                    continue
                if reason := exceeded(share, before.setdefault(index, now), now):
                    end(reason)
                    return
            await asyncio.sleep(self.interval_s)

    def _shared(self, shares: Mapping[int, int]) -> dict[int, int]:
        return {index: share for index, share in shares.items() if share < self.sizes[index]}

    def _usage(
        self, sample: Mapping[str, Mapping[int, int | None]], index: int, runner: int, zygote: int
    ) -> GpuUsage | None:
        return usage_of(sample.get(self.gpus[index].uuid, {}), runner, zygote)

    async def _current_sample(self, lifetime_s: float) -> Mapping[str, Mapping[int, int | None]]:
        """Return a sample that was at most `lifetime_s` old when this was called."""
        called = time.monotonic()
        async with self._sampling:
            if self._sample[0] < called - lifetime_s:
                # The driver answers even if the request that waits for it is cancelled.
                began = time.monotonic()
                answer = await asyncio.shield(asyncio.ensure_future(self.driver.processes()))
                self._sample = began, answer
            return self._sample[1]

    def _stop(self, why: str) -> None:
        if not self._is_blind:
            self._is_blind = True
            logger.warning(
                "the memory of requests on shared GPUs is not watched: %s. Only torch's own limit holds "
                "for their processes",
                why,
            )
