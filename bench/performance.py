"""The figures of docs/performance.md: `python -m bench.performance [REPORT.json]` writes table and plots.

The text around them stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from bench.figures import Figure
from bench.machine_state import said_of
from bench.plots import draw_all
from bench.report import LATEST, Report
from ndif.config.units import format_duration

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "performance.md"
IMAGES = _DOCS / "images"
BEGIN, END = (
    "<!-- figures: written by python -m bench.performance -->",
    "<!-- end of the figures -->",
)


def written(page: str, part: str) -> str:
    """Return a page with its part between the marks replaced.

    Raises:
        ValueError: If the marks are not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page has no part between {BEGIN!r} and {END!r}.")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def part_of(report: Report, plots: dict[str, Path]) -> str:
    """Return the machine, and a plot and a table of each scenario, as Markdown."""
    return "\n".join(_lines(report, plots))


def _lines(report: Report, plots: dict[str, Path]) -> Iterator[str]:
    machine = report.machine
    versions = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items() if version
    )
    dirty = " with changes" if machine["is_dirty"] else ""
    commit = f", commit {machine['commit'][:12]}{dirty}" if machine["commit"] else ""
    hold = sum(figure.holds for figure in report.figures)
    yield (
        f"{hold} of {len(report.figures)} figures hold. Measured on {machine['date'][:10]} in "
        f"{format_duration(report.seconds)}: {said_of(machine)}, Python "
        f"{machine['python']}, {versions}{commit}. A loop of five million steps took "
        f"{machine['loop_seconds']:.2f} s; the load was {machine['load_average'][0]:.1f} at the start."
    )
    for scenario, figures in groupby(report.figures, key=lambda figure: figure.scenario):
        yield f"\n### {scenario.replace('_', ' ').capitalize()}\n"
        if scenario in plots:
            alternative = f"The figures of {scenario.replace('_', ' ')} as parts of their limits"
            yield f"![{alternative}](images/{plots[scenario].name})\n"
        yield "| figure | measured | limit | | how |"
        yield "| --- | --- | --- | --- | --- |"
        yield from map(_row, figures)


def _row(figure: Figure) -> str:
    cells = (cell.strip().replace("|", "\\|").replace("\n", " ") for cell in figure.row())
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Write the part of the page, and the plots."""
    parser = argparse.ArgumentParser(prog="python -m bench.performance")
    parser.add_argument("report", nargs="?", type=Path, default=LATEST, metavar="REPORT.json")
    said = parser.parse_args(arguments)
    try:
        report = Report.read(said.report)
    except ValueError as error:
        parser.error(str(error))
    for old in IMAGES.glob("performance-*.svg"):
        old.unlink()  # a scenario may be gone
    PAGE.write_text(written(PAGE.read_text(), part_of(report, draw_all(report, IMAGES))))


if __name__ == "__main__":
    main()
