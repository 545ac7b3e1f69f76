"""Ratios of two commits that are measured side by side."""

from __future__ import annotations

from bench.abreast import interval


def test_interval_of_median_narrows_with_number_of_rounds() -> None:
    few, many = [0.9, 1.0, 1.1] * 3, [0.9, 1.0, 1.1] * 60
    for values in (few, many):
        low, high = interval(values)
        assert 0.9 <= low <= 1.0 <= high <= 1.1
    assert interval(many) == (1.0, 1.0)
    assert interval(few) != (1.0, 1.0)
