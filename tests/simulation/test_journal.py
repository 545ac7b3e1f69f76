"""Journals of a day, by the hour."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.simulation.journal import Meter


def test_meter_sums_levels_by_hour() -> None:
    meter = Meter()
    meter.change(1800, 2.0)
    meter.change(3600 + 900, -1.0)
    assert meter.read(3 * 3600) == 2 * 1800 + 2 * 900 + 2700 + 3600
    assert meter.hours == [3600.0, 4500.0, 3600.0]


def test_unused_meter_reads_zero() -> None:
    meter = Meter()
    assert meter.read(0) == 0.0
    assert meter.read(7200) == 0.0
    assert meter.hours == [0.0, 0.0]


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(-9, 9)), max_size=30))
def test_meter_hours_add_up_to_total(changes: list[tuple[float, int]]) -> None:
    meter, now, level, whole = Meter(), 0.0, 0, 0.0
    for gap, by in changes:
        whole += level * gap
        now += gap
        level += by
        meter.change(now, by)
    assert meter.read(now) == pytest.approx(whole, rel=1e-9, abs=1e-6)
    assert len(meter.hours) == -(-now // 3600)
