"""Comparison of two reports: changes beyond noise, their direction, and warnings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from bench.compare import Change, compared, main
from bench.figures import Figure
from bench.report import Report
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.reports import once, report, sampled

SAMPLES = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30)


def around(median: float, spread: float, seed: int, count: int = 20) -> list[float]:
    dice = random.Random(seed)
    return [median * dice.uniform(1 - spread, 1 + spread) for _ in range(count)]


@given(SAMPLES)
def test_report_compared_with_itself_is_unchanged(samples: list[float]) -> None:
    assert Change(sampled(samples), sampled(samples)).verdict == "same"


@given(SAMPLES, SAMPLES, st.booleans())
def test_verdict_is_reversed_when_reports_are_swapped(
    a: list[float], b: list[float], at_most: bool
) -> None:
    change = Change(sampled(a, at_most=at_most), sampled(b, at_most=at_most))
    back = Change(change.b, change.a)
    if change.is_tested and change.is_beyond_noise and back.is_beyond_noise:
        assert change.is_worse != back.is_worse
    assert not (change.part == 0 and change.is_beyond_noise)


@given(st.lists(st.floats(1.0, 1.4), min_size=5, max_size=30), st.booleans())
def test_uniformly_larger_samples_are_a_change(samples: list[float], at_most: bool) -> None:
    larger = [value * 1.5 for value in samples]
    change = Change(sampled(samples, at_most=at_most), sampled(larger, at_most=at_most))
    assert change.verdict == ("worse" if at_most else "better")
    assert Change(change.b, change.a).verdict == ("better" if at_most else "worse")


def test_median_difference_within_spread_is_no_change() -> None:
    change = Change(sampled(around(1.0, 0.5, 1, 12)), sampled(around(1.0, 0.5, 2, 12)))
    assert abs(change.part) > 0.02
    assert change.verdict == "same"


def test_significant_but_small_difference_is_no_change() -> None:
    change = Change(sampled(around(1.0, 0.001, 1)), sampled(around(1.015, 0.001, 2)))
    assert change.is_tested
    assert change.verdict == "same"
    assert Change(change.a, sampled(around(1.03, 0.001, 2))).verdict == "worse"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (once(1.0), once(1.09), "same"),
        (once(1.0), once(1.11), "worse (one sample)"),
        (once(1.0), once(0.89), "better (one sample)"),
        (once(1.0, at_most=False), once(0.89, at_most=False), "worse (one sample)"),
        (once(0.0), once(0.0), "same"),
        (once(0.0), once(1.0), "worse (one sample)"),
        (once(-1.0), once(-0.5), "worse (one sample)"),
        # The statistical test cannot distinguish four samples from four samples.
        (sampled([1.0] * 4), sampled([1.5] * 4), "worse (4 samples)"),
        (sampled([1.0] * 4), sampled([1.05] * 4), "same"),
    ],
)
def test_figure_with_few_samples_changes_only_beyond_ten_percent(
    a: Figure, b: Figure, expected: str
) -> None:
    assert Change(a, b).verdict == expected


def test_figures_are_matched_by_scenario_name_and_unit() -> None:
    other = once(1.0, "renamed")
    elsewhere = Figure("c", 1.0, 10.0, "s", scenario="warm")
    in_ms = Figure("c", 1.0, 10.0, "ms", scenario="jobs")
    both, only_a, only_b = compared(
        report(once(1.0), sampled([1.0, 2.0])), report(sampled([1.0, 2.0]), other, elsewhere, in_ms)
    )
    assert [change.a.name for change in both] == ["a / b"]
    assert [figure.name for figure in only_a] == ["c"]
    assert only_b == [other, elsewhere, in_ms]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(tmp_path / name) for name in ("a.json", "b.json")]


def output_of_compare(
    files: list[str], a: Report, b: Report, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    for file, written in zip(files, (a, b), strict=True):
        written.write(Path(file))
    code = main(files)
    return code, capsys.readouterr().out


def test_exit_code_is_1_if_any_figure_is_worse(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    slow, fast = report(sampled(around(1.5, 0.1, 1))), report(sampled(around(1.0, 0.1, 2)))
    code, output = output_of_compare(files, fast, slow, capsys)
    assert code == 1
    assert "worse" in output
    assert "1 of 1 figures are worse beyond noise." in output
    code, output = output_of_compare(files, slow, fast, capsys)
    assert code == 0
    assert "better" in output


def test_comparison_warns_of_different_machines(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, output = output_of_compare(files, report(once(1.0)), report(once(1.0), cpus=16), capsys)
    assert "different machines: 2 x a processor, 16 GiB, and 16 x a processor, 16 GiB." in output
    _, output = output_of_compare(
        files, report(once(1.0)), report(once(1.0), loop_seconds=0.24), capsys
    )
    assert "took 0.20 s in the first report, 0.24 s in the second" in output
    assert "different machines" not in output
    _, output = output_of_compare(
        files, report(once(1.0)), report(once(1.0), loop_seconds=0.22), capsys
    )
    assert "loop" not in output


def test_comparison_names_figures_of_only_one_report(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = output_of_compare(files, report(once(1.0)), report(once(1.0, "d")), capsys)
    assert code == 0
    assert f"Only {files[0]} has: jobs: c." in output
    assert f"Only {files[1]} has: jobs: d." in output
    assert "no figure in common" in output


def test_comparison_rejects_file_that_is_not_a_report(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report().write(Path(files[0]))
    Path(files[1]).write_text("{}")
    with pytest.raises(SystemExit) as refused:
        main(files)
    assert refused.value.code == 2
    assert f"{files[1]} is not a report" in capsys.readouterr().err
