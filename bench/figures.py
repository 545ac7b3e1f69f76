"""One measured number beside its limit."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

from bench.sampling import quartiles

MB = 1 << 20


@dataclass
class Figure:
    """One measured number beside its limit."""

    name: str
    value: float
    limit: float | None
    """None if the figure has no limit, only a peer that `how` names."""
    unit: str
    at_most: bool = True
    how: str = ""
    samples: list[float] = field(default_factory=list)
    """One value per round; the figure is their median. Empty if it was measured once."""
    scenario: str = ""

    @staticmethod
    def of(
        name: str,
        samples: Sequence[float],
        limit: float | None,
        unit: str,
        *,
        at_most: bool = True,
        how: str = "",
    ) -> Figure:
        """Return a figure with these samples and their median."""
        return Figure(name, statistics.median(samples), limit, unit, at_most, how, [*samples])

    @property
    def holds(self) -> bool:
        """Return True if the value is within the limit."""
        if self.limit is None:
            return True
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def row(self) -> tuple[str, str, str, str, str]:
        """Return the figure as a row of `table`."""
        limit, verdict = "", ""
        if self.limit is not None:
            limit = f"{'≤' if self.at_most else '≥'} {self.limit:g} {self.unit}"
            verdict = "holds" if self.holds else "does not hold"
        measured = f"{self.value:.2f} {self.unit}"
        if self.samples:
            first, third = quartiles(self.samples)
            measured += f" ({first:.2f} to {third:.2f})"
        return self.name, measured, limit, verdict, self.how


def columns_of_ends(ends: Collection[Mapping[str, int]]) -> list[str]:
    """Return the columns of a table of jobs' ends: all ends that occur, and hung jobs in any case."""
    columns = [
        f"{how} {end}"
        for how in ("polled", "live")
        for end in ("COMPLETED", "ERROR", "lost", "closed", "hung")
    ]
    return [
        column
        for column in columns
        if "hung" in column or any(counter.get(column) for counter in ends)
    ]


def table(title: str, figures: Iterable[Figure]) -> Table:
    """Return a table of figures and their limits."""
    shown = Table(title=title)
    for heading in ("figure", "measured", "limit", "", "how"):
        shown.add_column(heading, overflow="fold")
    for figure in figures:
        shown.add_row(*map(escape, figure.row()), style=None if figure.holds else "red")
    return shown
