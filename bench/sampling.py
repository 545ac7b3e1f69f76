"""Samples of several ways to do one thing, taken in turn, with a check of the machine's other load.

This module needs only the standard library: clients of every generation import it.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "NDIF_BENCH"
"""Environment variable that marks a benchmark's own processes, which inherit it."""
BUSY = 0.05
"""Share of the machine's cores above which other programs' work makes a round busy."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STEAL = 8
_PF_KTHREAD = 0x00200000


class Neighbours:
    """The processor time of all processes outside this benchmark."""

    def __init__(self, mark: str = MARK) -> None:
        """Record the current processes; processes with the variable `mark` belong to this benchmark."""
        self._mark = f"{mark}=".encode()
        self._ours: dict[tuple[int, int], bool] = {}
        self._before: dict[tuple[int, int], int] = {}
        self._steal = 0
        self.used_s()

    def used_s(self) -> float:
        """Return the core-seconds that other processes used since the last call (`proc(5)`)."""
        now: dict[tuple[int, int], int] = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                process = (int(entry.name), int(fields[19]))
                if process not in self._ours:
                    self._ours[process] = self._is_ours(
                        entry.path, *map(int, (fields[1], fields[6]))
                    )
            except OSError:  # the process has just ended
                continue
            if not self._ours[process]:
                now[process] = int(fields[11]) + int(fields[12])
        ticks = sum(used - self._before.get(process, 0) for process, used in now.items())
        steal = int(Path("/proc/stat").read_text().split(maxsplit=_STEAL + 1)[_STEAL])
        ticks += steal - self._steal
        self._before, self._steal = now, steal
        return ticks * _TICK_S

    def _is_ours(self, path: str, parent: int, flags: int) -> bool:
        """Return True for a kernel thread, a process with the mark, and a child of either."""
        if flags & _PF_KTHREAD:
            return True
        if any(is_ours for (pid, _), is_ours in self._ours.items() if pid == parent):
            return True
        try:
            return self._mark in Path(path, "environ").read_bytes()
        except PermissionError:  # another user's process
            return False


@dataclass
class Samples:
    """The seconds of each way, one value per round, without rounds with other programs' work."""

    seconds: dict[str, list[float]]
    busy: int = 0
    """Number of busy rounds."""
    is_busy_machine: bool = False
    """True if too few rounds were quiet, so that busy rounds are kept, too."""
    more: dict[str, Any] = field(default_factory=dict)

    def median(self, way: str) -> float:
        """Return the median of a way, in seconds."""
        return statistics.median(self.seconds[way])

    def per_round(self, of: Callable[..., float], *ways: str) -> list[float]:
        """Return one value per round: `of`, applied to the seconds of these ways."""
        return [of(*row) for row in zip(*(self.seconds[way] for way in ways), strict=True)]

    @property
    def summary(self) -> str:
        """Return a phrase on the number of rounds and the quality of the samples."""
        kept = len(next(iter(self.seconds.values())))
        if self.is_busy_machine:
            return f"{kept} rounds, {self.busy} of them beside other programs"
        return f"{kept} rounds" + (f", {self.busy} busy ones left out" if self.busy else "")

    def to_json(self) -> dict[str, Any]:
        """Return text that `of_json` reads."""
        return dict(vars(self))

    @staticmethod
    def of_json(fields: Mapping[str, Any]) -> Samples:
        """Return samples of another process."""
        return Samples(**fields)


def in_turn(
    ways: Mapping[str, Callable[[], float | None]],
    *,
    rounds: int,
    warm_up: int = 3,
    pause_s: float = 0.15,
) -> Samples:
    """Sample each way once a round, after equal pauses and in a different order in each round.

    A way returns its own measurement, or None for the time of its call. Rounds in which other programs
    used more than `BUSY` of the machine are repeated, at most `rounds` times. The orders are random, but
    the same in each run. With periodic orders, a periodic event would always affect the same way: for
    example a client's garbage collection in every fourth trace.
    """
    names, orders = [*ways], random.Random(0)
    others, cores = Neighbours(), os.cpu_count() or 1
    quiet: list[dict[str, float]] = []
    busy: list[dict[str, float]] = []
    for number in range(warm_up + 2 * rounds):
        if len(quiet) == rounds:
            break
        row: dict[str, float] = {}
        others.used_s()
        began = time.perf_counter()
        for name in orders.sample(names, len(names)):
            time.sleep(pause_s)
            row[name] = timed(ways[name])
        part = others.used_s() / (time.perf_counter() - began) / cores
        if number >= warm_up:
            (busy if part > BUSY else quiet).append(row)
    is_busy = len(quiet) < rounds / 2
    kept = quiet + busy if is_busy else quiet
    return Samples({name: [row[name] for row in kept] for name in names}, len(busy), is_busy)


async def in_turn_on_loop(
    ways: Mapping[str, Callable[[], Coroutine[Any, Any, float | None]]], **taken: Any
) -> Samples:
    """Sample coroutines of this loop, which continues to run during the pauses; see `in_turn`."""
    loop = asyncio.get_running_loop()

    def blocking(
        way: Callable[[], Coroutine[Any, Any, float | None]],
    ) -> Callable[[], float | None]:
        return lambda: asyncio.run_coroutine_threadsafe(way(), loop).result()

    return await asyncio.to_thread(
        in_turn, {name: blocking(way) for name, way in ways.items()}, **taken
    )


def timed(run: Callable[[], float | None]) -> float:
    """Return a run's own measurement, or the seconds of the call."""
    began = time.perf_counter()
    measured = run()
    return time.perf_counter() - began if measured is None else measured


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value at this quantile, from 0 to 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    return quantile(values, 0.25), quantile(values, 0.75)
