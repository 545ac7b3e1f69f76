"""The cost summary survives the crash of a test process, so the run still names the test."""

from __future__ import annotations

import pytest

from tests.costs import Summary

pytestmark = pytest.mark.unit


def test_crash_report_of_test_process_adds_no_cost() -> None:
    summary = Summary()
    for phase in ("call", "???"):  # xdist reports a crash with this phase
        summary.pytest_runtest_logreport(
            pytest.TestReport(
                "tests/a/test_b.py::test_c",
                ("tests/a/test_b.py", 1, "test_c"),
                {},
                "failed",
                None,
                phase,  # type: ignore[arg-type]
                duration=2.0,
            )
        )
    assert summary.files["tests/a/test_b.py"].seconds == 2.0
    assert summary.files["tests/a/test_b.py"].count == 1
