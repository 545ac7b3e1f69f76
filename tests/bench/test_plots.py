"""Plots of reports: they are reproducible and show figures that hold left of the limit line."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.figures import Figure
from bench.plots import draw_all, main, parts, scenarios
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.reports import once, report, sampled

FIGURES = (
    sampled([0.5, 0.6, 0.9, 4.0]),
    sampled([-3.0, 1.0, 1.2], "negative & small"),
    sampled([5.0, 0.0, 7.0], "at least", at_most=False),
    once(500.0, "far beyond"),
)


def test_plot_of_report_is_reproducible(tmp_path: Path) -> None:
    drawn = [draw_all(report(*FIGURES), tmp_path / name)["jobs"].read_bytes() for name in "ab"]
    assert drawn[0] == drawn[1]
    assert b"<dc:date>" not in drawn[0]


def test_plot_names_each_figure_with_value_and_limit(tmp_path: Path) -> None:
    file = draw_all(report(*FIGURES), tmp_path)["jobs"]
    texts = {
        element.text for element in ElementTree.parse(file).iter() if element.tag.endswith("text")
    }
    assert {figure.name for figure in FIGURES} <= texts
    assert "500 s  (≤ 10)" in texts
    assert "5 x  (≥ 2)" in texts


def test_only_scenarios_with_limited_figures_have_plots(tmp_path: Path) -> None:
    shown = report(
        once(1.0),
        Figure("a peer alone", 1.0, None, "x", scenario="jobs"),
        Figure("must be none", 0.0, 0.0, "", scenario="usage"),
        Figure("x", 1.0, 2.0, "x", scenario="small_trace"),
    )
    assert [(name, len(figures)) for name, figures in scenarios(shown.figures)] == [
        ("jobs", 1),
        ("small_trace", 1),
    ]
    draw_all(shown, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "performance-jobs.svg",
        "performance-small-trace.svg",
    ]


@given(st.floats(0.001, 1e6), st.floats(0.001, 1e6), st.booleans())
def test_bar_is_within_limit_only_if_figure_holds(
    value: float, limit: float, at_most: bool
) -> None:
    figure = Figure("", value, limit, "", at_most)
    (part,) = parts(figure)
    assert (part <= 1) == figure.holds


def test_plot_command_draws_report_into_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(once(1.0)).write(tmp_path / "report.json")
    main([str(tmp_path / "report.json"), str(tmp_path / "plots")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "plots" / "performance-jobs.svg")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing.json")])
    assert "cannot be read" in capsys.readouterr().err
