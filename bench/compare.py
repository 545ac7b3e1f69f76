"""Compare two reports: `python -m bench.compare A.json B.json`; exit 1 if any figure is worse in B.

A change is beyond noise if a Mann-Whitney U test of the samples is significant and the medians differ by
more than `CHANGE`. A figure without enough samples for the test must differ by more than `CHANGE_OF_ONE`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.figures import Figure
from bench.machine_state import describe_machine
from bench.report import Report

P = 0.01
CHANGE = 0.02
"""Smallest relative difference of medians that counts as a change."""
CHANGE_OF_ONE = 0.10
"""Smallest relative difference that counts as a change without enough samples."""
_FEW = 8
SPEED = 0.15
"""Largest relative difference of two machines' speed."""


@dataclass(frozen=True)
class Change:
    """One figure in two reports."""

    a: Figure
    b: Figure

    @property
    def part(self) -> float:
        """Return the increase from A to B relative to A; infinite if A is 0."""
        if self.a.value == self.b.value:
            return 0.0
        more = self.b.value - self.a.value
        return more / abs(self.a.value) if self.a.value else math.copysign(math.inf, more)

    @property
    def is_tested(self) -> bool:
        """Return True if the figures have enough samples for the test to reach significance."""
        count = len(self.a.samples), len(self.b.samples)
        return 2 / math.comb(sum(count), count[0]) < P

    @property
    def is_beyond_noise(self) -> bool:
        """Return True if the figure has changed."""
        if not self.is_tested:
            return abs(self.part) > CHANGE_OF_ONE
        if abs(self.part) <= CHANGE:
            return False
        from scipy.stats import mannwhitneyu  # the import takes a second

        a, b = self.a.samples, self.b.samples
        # With ties, "auto" uses an approximation, with which few samples never differ significantly.
        method = "exact" if min(len(a), len(b)) <= _FEW else "auto"
        return bool(mannwhitneyu(a, b, method=method).pvalue < P)

    @property
    def is_worse(self) -> bool:
        """Return True if the figure has changed towards its limit's wrong side."""
        return self.is_beyond_noise and (self.part > 0) == self.a.at_most

    @property
    def verdict(self) -> str:
        """Return the verdict."""
        if not self.is_beyond_noise:
            return "same"
        verdict = "worse" if self.is_worse else "better"
        if self.is_tested:
            return verdict
        fewest = min(len(self.a.samples), len(self.b.samples))
        return f"{verdict} ({'one sample' if fewest < 2 else f'{fewest} samples'})"

    def row(self) -> tuple[str, ...]:
        """Return the change as a row of `table`."""
        values = (f"{figure.value:.2f} {figure.unit}".rstrip() for figure in (self.a, self.b))
        part = f"{self.part:+.1%}" if math.isfinite(self.part) else "from 0"
        return self.a.scenario, self.a.name, *values, part, self.verdict


def compared(a: Report, b: Report) -> tuple[list[Change], list[Figure], list[Figure]]:
    """Return the figures in both reports, the figures only in A, and the figures only in B."""
    in_a, in_b = ({_key(figure): figure for figure in report.figures} for report in (a, b))
    both = [Change(figure, in_b[key]) for key, figure in in_a.items() if key in in_b]
    only_a = [figure for key, figure in in_a.items() if key not in in_b]
    return both, only_a, [figure for key, figure in in_b.items() if key not in in_a]


def _key(figure: Figure) -> tuple[str, str, str, bool]:
    # A figure with another unit, or with a limit on the other side, is a different figure.
    return figure.scenario, figure.name, figure.unit, figure.at_most


def warnings(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """Yield a warning for each difference of the machines that makes a comparison unreliable."""
    of_a, of_b = describe_machine(a), describe_machine(b)
    if of_a != of_b:
        yield f"The reports are of different machines: {of_a}, and {of_b}."
    slow, fast = sorted((a["loop_seconds"], b["loop_seconds"]), reverse=True)
    if slow > fast * (1 + SPEED):
        yield (
            f"The machine was not equally fast: a loop of five million steps took "
            f"{a['loop_seconds']:.2f} s in the first report, {b['loop_seconds']:.2f} s in the second."
        )


def table(changes: list[Change]) -> Table:
    """Return a table of changes."""
    shown = Table()
    for heading in ("scenario", "figure", "A", "B", "change", ""):
        shown.add_column(heading, overflow="fold")
    for change in changes:
        style = None
        if change.is_beyond_noise:
            style = "red" if change.is_worse else "green"
        shown.add_row(*map(escape, change.row()), style=style)
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Compare two reports; return 1 if any figure is worse."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare")
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    paths = parser.parse_args(arguments)
    try:
        a, b = Report.read(paths.a), Report.read(paths.b)
    except ValueError as error:
        parser.error(str(error))
    changes, *alone = compared(a, b)
    console = Console(width=160)
    if changes:
        console.print(table(changes))
    for path, figures in zip((paths.a, paths.b), alone, strict=True):
        if figures:
            names = ", ".join(f"{figure.scenario}: {figure.name}" for figure in figures)
            print(f"Only {path} has: {names}.")
    for sentence in warnings(a.machine, b.machine):
        print(sentence)
    if not changes:
        print("The reports have no figure in common.")
    worse = sum(change.is_worse for change in changes)
    print(f"{worse} of {len(changes)} figures are worse beyond noise.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
