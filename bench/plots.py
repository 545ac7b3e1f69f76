"""Plots of a report, one per scenario: `python -m bench.plots [REPORT.json] [FOLDER]`.

Each figure is drawn relative to its limit, so that all figures within their limits are left of one line. A
value with an upper limit is divided by the limit; a lower limit is divided by the value.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from bench.figures import Figure
from bench.report import LATEST, RESULTS, Report
from bench.sampling import quartiles

MOST = 2.0
"""Right edge of a plot, relative to the limit; larger values are marked at the edge."""
_HOLDS, _FAILS, _LIMIT = "#1f6f8b", "#b3261e", "#444444"
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "ndif",  # otherwise the ids of elements are random
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}
_WIDTH_IN, _ROW_IN, _AROUND_IN = 9.0, 0.42, 1.15


def scenarios(figures: Sequence[Figure]) -> Iterator[tuple[str, list[Figure]]]:
    """Yield each scenario with the figures that a plot can show: figures with a limit other than 0."""
    shown = [figure for figure in figures if figure.limit and (figure.at_most or figure.value > 0)]
    for scenario, group in groupby(shown, key=lambda figure: figure.scenario):
        yield scenario, [*group]


def parts(figure: Figure) -> list[float]:
    """Return the samples, or the value, relative to the limit: at most 1 if the limit holds."""
    assert figure.limit
    values = figure.samples or [figure.value]
    if figure.at_most:
        return [value / figure.limit for value in values]
    return [figure.limit / value if value > 0 else math.inf for value in values]


def draw(scenario: str, figures: Sequence[Figure], file: Path) -> None:
    """Write the plot of a scenario."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        height = _AROUND_IN + _ROW_IN * len(figures)
        drawing = Drawing(figsize=(_WIDTH_IN, height), layout="constrained", facecolor="white")
        axes = drawing.subplots()
        for row, figure in enumerate(figures):
            _draw_row(axes, row, figure)
        axes.axvline(1, color=_LIMIT, linewidth=1.2)
        least = min(0.0, *(min(parts(figure)) for figure in figures))
        axes.set_xlim(max(least, -MOST), MOST)
        axes.set_ylim(len(figures) - 0.5, -0.5)
        axes.set_yticks(range(len(figures)), [figure.name for figure in figures])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("part of the limit: median, quartiles, all samples; left of the line holds")
        axes.set_title(scenario.replace("_", " "), loc="left", fontweight="bold")
        values = axes.secondary_yaxis("right")
        values.set_yticks(range(len(figures)), [_caption(figure) for figure in figures])
        values.tick_params(axis="y", length=0)
        values.spines[:].set_visible(False)
        drawing.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def _draw_row(axes: Axes, row: int, figure: Figure) -> None:
    color = _HOLDS if figure.holds else _FAILS
    (median,) = parts(Figure(figure.name, figure.value, figure.limit, "", figure.at_most))
    if figure.samples:
        samples = parts(figure)
        inside = [part for part in samples if abs(part) <= MOST]
        axes.scatter(inside, [row] * len(inside), s=9, color=color, alpha=0.25, linewidths=0)
        first, third = (min(part, MOST) for part in quartiles(samples))
        axes.hlines(row, first, third, color=color, linewidth=5, alpha=0.45)
    if median <= MOST:
        axes.scatter([median], [row], s=34, color=color, zorder=3)
    else:
        axes.scatter([MOST], [row], s=50, color=color, marker=">", zorder=3, clip_on=False)


def _caption(figure: Figure) -> str:
    sign = "≤" if figure.at_most else "≥"
    return f"{figure.value:.3g} {figure.unit}".rstrip() + f"  ({sign} {figure.limit:g})"


def draw_all(report: Report, folder: Path) -> dict[str, Path]:
    """Write a plot of each scenario into a folder; return the files by scenario."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for scenario, figures in scenarios(report.figures):
        files[scenario] = folder / f"performance-{scenario.replace('_', '-')}.svg"
        draw(scenario, figures, files[scenario])
    return files


def main(arguments: list[str] | None = None) -> None:
    """Draw a report."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots")
    parser.add_argument("report", nargs="?", type=Path, default=LATEST, metavar="REPORT.json")
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        report = Report.read(options.report)
    except ValueError as error:
        parser.error(str(error))
    for file in draw_all(report, options.folder).values():
        print(file)


if __name__ == "__main__":
    main()
