"""A pytest plugin that writes each test's outcome as it ends, so that an interrupted run keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_REASON = 300


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--record", type=Path, help="write outcomes to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    """Record outcomes if `--record` names a file."""
    if path := config.getoption("--record"):
        config.pluginmanager.register(Recording(path))


def first_line(report: pytest.TestReport) -> str:
    """Return the reason why a test failed or was skipped."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr or "")[:_REASON]


class Recording:
    """The outcomes of one run, in one file that is replaced after each test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, list[str]] = {}
        self._write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test has begun, so that a test that never ends is visible."""
        self._rows[nodeid] = [nodeid.rpartition("/")[2], "running", ""]
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test's call, and of any phase that failed or was skipped."""
        row = self._rows[report.nodeid]
        if report.when == "call" or not report.passed:
            reason = first_line(report)
            row[1:] = [report.outcome, reason or f"{report.duration:.1f} s"]
            self._write()

    def _write(self) -> None:
        write_json(self._path, {"table": list(self._rows.values())})
