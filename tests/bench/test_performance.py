"""The page of performance figures: its generated part and its plots."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench.performance import BEGIN, END, IMAGES, PAGE, beside, part_of, since, written

from tests.bench.reports import once, report, sampled


def test_only_part_between_marks_is_replaced() -> None:
    page = f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    once_written = written(page, "new")
    assert once_written == f"before\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter\n"
    assert written(once_written, "new") == once_written
    for broken in ("", BEGIN, END, f"{END}{BEGIN}"):
        with pytest.raises(ValueError, match="no part between"):
            written(broken, "new")


def test_table_row_has_quartiles_limit_and_verdict() -> None:
    part = part_of(
        report(sampled([1.0, 2.0, 3.0, 4.0, 5.0], "a | b"), once(1.0)),
        {"jobs": Path("performance-jobs.svg")},
    )
    assert "| a \\| b | 3.00 x (2.00 to 4.00) | ≤ 2 x | does not hold |  |" in part
    assert "| c | 1.00 s | ≤ 10 s | holds |  |" in part
    assert "1 of 2 figures hold." in part
    assert "2 x a processor, 16 GiB" in part
    assert "commit 0123456789ab with changes" in part
    assert "ray" not in part
    assert "(images/performance-jobs.svg)" in part


def test_figures_of_peer_have_table_with_scenarios() -> None:
    theirs = sampled([4.0], "a / theirs", at_most=False)
    run = report(sampled([1.0]), theirs, commit="fedcba9876543210")
    lines = [*beside(run, report(sampled([1.5])))]
    assert "commit fedcba987654" in lines[1]
    assert len(lines) == 5
    assert lines[-1] == "| Jobs | a / theirs | 4.00 x (4.00 to 4.00) | ≥ 2 x | holds |  |"


def test_changes_since_earlier_report_have_table() -> None:
    earlier = report(sampled([8.0] * 9), once(1.0), once(3.0, "gone"), commit="fedcba9876543210")
    lines = [*since(earlier, report(sampled([2.0] * 9), once(1.0)))]
    assert "commit fedcba987654" in lines[1]
    assert lines[-2:] == [
        "| Jobs | a / b | 8.00 x | 2.00 x | -75.0% | better |",
        "| Jobs | c | 1.00 s | 1.00 s | +0.0% | same |",
    ]


def test_page_has_marks_and_shows_every_plot() -> None:
    page = PAGE.read_text()
    assert written(page, "x") != page
    shown = set(re.findall(r"\(images/(performance-[\w-]+\.svg)\)", page))
    assert shown
    assert shown == {file.name for file in IMAGES.glob("performance-*.svg")}
