"""The figures of docs/performance.md: `python -m bench.performance [REPORT.json...]` writes its tables.

Several reports are runs of one commit. Reports of an earlier commit (`--before`), and a report of a run
beside the original (`--original`), get separate tables. The text around the tables stays unchanged.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from bench.compare import compared
from bench.figures import Figure
from bench.machine_state import describe_machine
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
    """Return the machine, and the plot and table of each scenario, as Markdown."""
    return "\n".join(_lines(report, plots))


def _lines(report: Report, plots: dict[str, Path]) -> Iterator[str]:
    hold = sum(figure.holds for figure in report.figures)
    yield f"{hold} of {len(report.figures)} figures hold. {_measured(report)}"
    for scenario, figures in groupby(report.figures, key=lambda figure: figure.scenario):
        yield f"\n### {_title(scenario)}\n"
        if scenario in plots:
            yield f"![Plot of {_title(scenario).lower()}](images/{plots[scenario].name})\n"
        yield from table_of(("figure", "measured", "limit", "", "how"), map(Figure.row, figures))


def since(before: Report, report: Report) -> Iterator[str]:
    """Yield the lines of a table of changes since an earlier report."""
    yield "\n### Before and after\n"
    yield f"Before: {_measured(before)}\n"
    changes, _, _ = compared(before, report)
    rows = (
        (_title(scenario), name, *rest)
        for scenario, name, *rest in (change.row() for change in changes)
    )
    yield from table_of(("scenario", "figure", "before", "after", "change", ""), rows)


def beside(peers: Report, report: Report) -> Iterator[str]:
    """Yield the lines of a table of figures that only the run beside a peer has."""
    _, _, more = compared(report, peers)
    yield "\n### Beside the original\n"
    yield f"{_measured(peers)}\n"
    yield from table_of(
        ("scenario", "figure", "measured", "limit", "", "how"),
        ((_title(figure.scenario), *figure.row()) for figure in more),
    )


def _measured(report: Report) -> str:
    """Return sentences on the machine and date of a report."""
    machine = report.machine
    versions = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items() if version
    )
    dirty = " with changes" if machine["is_dirty"] else ""
    commit = f", commit {machine['commit'][:12]}{dirty}" if machine["commit"] else ""
    return (
        f"Measured on {machine['date'][:10]} in {format_duration(report.seconds)}: "
        f"{describe_machine(machine)}, Python {machine['python']}, {versions}{commit}. "
        f"A loop of five million steps took "
        f"{machine['loop_seconds']:.2f} s; the load was {machine['load_average'][0]:.1f} at the start."
    )


def _title(scenario: str) -> str:
    return scenario.replace("_", " ").capitalize()


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(headings)} |".replace("|  |", "| |")
    yield f"|{'|'.join('---' for _ in headings)}|"
    for row in rows:
        cells = (cell.strip().replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Write the figures into the page, and write the plots."""
    parser = argparse.ArgumentParser(prog="python -m bench.performance")
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT.json")
    parser.add_argument("--before", nargs="+", type=Path, help="reports of an earlier commit")
    parser.add_argument("--original", type=Path, help="report of a run beside the original")
    options = parser.parse_args(arguments)
    try:
        report = Report.of_runs(options.reports or [LATEST])
        more = [
            *([] if options.original is None else beside(Report.read(options.original), report)),
            *([] if options.before is None else since(Report.of_runs(options.before), report)),
        ]
    except ValueError as error:
        parser.error(str(error))
    from bench.plots import draw_all  # the import takes a second

    for old in IMAGES.glob("performance-*.svg"):
        old.unlink()  # a scenario may have been removed
    part = "\n".join([part_of(report, draw_all(report, IMAGES)), *more])
    PAGE.write_text(written(PAGE.read_text(), part))


if __name__ == "__main__":
    main()
