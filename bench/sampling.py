"""Samples of several ways to do one thing, taken in turn, with the machine's state beside each.

It needs the standard library alone: clients of every generation import it.
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
"""Environment variable that a benchmark's own processes inherit."""
BUSY = 0.05
"""Part of the machine's cores above which other programs' work makes a sample a busy one."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STEAL = 8
_PF_KTHREAD = 0x00200000


class Neighbours:
    """The processor time that belongs to no process of this benchmark."""

    def __init__(self, mark: str = MARK) -> None:
        """Look at the processes there are, of which those with the mark are this benchmark's."""
        self._mark = f"{mark}=".encode()
        self._ours: dict[tuple[int, int], bool] = {}
        self._before: dict[tuple[int, int], int] = {}
        self._steal = 0
        self.used_s()

    def used_s(self) -> float:
        """Return the seconds, of all cores, that others took since the last call (`proc(5)`)."""
        now: dict[tuple[int, int], int] = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                one = (int(entry.name), int(fields[19]))
                if one not in self._ours:
                    self._ours[one] = self._is_ours(entry.path, *map(int, (fields[1], fields[6])))
            except OSError:  # it ended just now
                continue
            if not self._ours[one]:
                now[one] = int(fields[11]) + int(fields[12])
        ticks = sum(used - self._before.get(one, 0) for one, used in now.items())
        steal = int(Path("/proc/stat").read_text().split(maxsplit=_STEAL + 1)[_STEAL])
        ticks += steal - self._steal
        self._before, self._steal = now, steal
        return ticks * _TICK_S

    def _is_ours(self, path: str, parent: int, flags: int) -> bool:
        """Return True for a kernel's thread, a process with the mark, and a child of such a one."""
        if flags & _PF_KTHREAD:
            return True
        if any(is_ours for (pid, _), is_ours in self._ours.items() if pid == parent):
            return True
        try:
            return self._mark in Path(path, "environ").read_bytes()
        except PermissionError:  # another user's
            return False


@dataclass
class Samples:
    """The seconds of each way, a value a round, without rounds beside other programs' work."""

    seconds: dict[str, list[float]]
    busy: int = 0
    """Rounds that are left out."""
    is_busy_machine: bool = False
    """True if too few rounds were quiet, so that all are kept."""
    more: dict[str, Any] = field(default_factory=dict)

    def median(self, way: str) -> float:
        """Return the median of a way, in seconds."""
        return statistics.median(self.seconds[way])

    def each(self, of: Callable[..., float], *ways: str) -> list[float]:
        """Return a value of each round: `of` the seconds of these ways."""
        return [of(*row) for row in zip(*(self.seconds[way] for way in ways), strict=True)]

    @property
    def said(self) -> str:
        """Return a phrase about what the samples are worth."""
        kept = len(next(iter(self.seconds.values())))
        if self.is_busy_machine:
            return f"{kept} rounds, {self.busy} of them beside other programs"
        return f"{kept} rounds" + (f", {self.busy} busy ones left out" if self.busy else "")

    def to_json(self) -> dict[str, Any]:
        """Return what `of_json` reads."""
        return dict(vars(self))

    @staticmethod
    def of_json(said: Mapping[str, Any]) -> Samples:
        """Return the samples that another process has taken."""
        return Samples(**said)


def in_turn(
    ways: Mapping[str, Callable[[], float | None]],
    *,
    rounds: int,
    warm_up: int = 3,
    pause_s: float = 0.15,
) -> Samples:
    """Sample each way once a round, each after the same pause and in an order of the round's own.

    A way returns what it measured itself, or None to have its time taken. Rounds during which other
    programs took more than `BUSY` of the machine are repeated, up to as many again. The orders are random,
    and the same in each run: what comes back at intervals, such as a client's collection of garbage in
    every fourth trace, would meet the same way each time if the orders came back too.
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
    """Sample coroutines of this loop, which goes on during the pauses; see `in_turn`."""
    loop = asyncio.get_running_loop()

    def blocking(
        way: Callable[[], Coroutine[Any, Any, float | None]],
    ) -> Callable[[], float | None]:
        return lambda: asyncio.run_coroutine_threadsafe(way(), loop).result()

    return await asyncio.to_thread(
        in_turn, {name: blocking(way) for name, way in ways.items()}, **taken
    )


def timed(run: Callable[[], float | None]) -> float:
    """Return what a run measured itself, or its seconds."""
    began = time.perf_counter()
    measured = run()
    return time.perf_counter() - began if measured is None else measured


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which this part of all lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    return quantile(values, 0.25), quantile(values, 0.75)
