"""A pytest plugin that measures tests and fixtures, and ends a run with a table of the slowest."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

MOST = 20
"""Number of files and fixtures in a table."""
_CGROUPS = Path("/sys/fs/cgroup/cpuacct")

_fixtures: list[tuple[str, str, float, float]] = []
"""Name, phase, seconds and core-seconds of each fixture since the last report."""
_cgroup: Path | None = None
_usage = -1
"""Descriptor of the cgroup's usage file: a test may replace the methods of `Path`."""


def _core_seconds() -> float:
    """Return the core-seconds of this process and its descendants; without a cgroup, of ended ones only."""
    if _usage >= 0:
        return int(os.pread(_usage, 64, 0)) / 1e9
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _enter_cgroup() -> None:
    """Count this process and its descendants together, if a version 1 cgroup can be made."""
    global _cgroup, _usage
    folder = _CGROUPS / f"ndif-tests-{os.getpid()}"
    with contextlib.suppress(OSError):
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        _usage = os.open(folder / "cpuacct.usage", os.O_RDONLY)
        _cgroup = folder
        atexit.register(_leave_cgroup, os.getpid())


def _leave_cgroup(owner: int) -> None:
    if os.getpid() == owner and _cgroup is not None:
        with contextlib.suppress(OSError):
            (_CGROUPS / "cgroup.procs").write_text(str(owner))
            _cgroup.rmdir()  # refused while a process is left in it


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _enter_cgroup()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(), "costs-summary")


_CORES = pytest.StashKey[dict[str, float]]()


@contextlib.contextmanager
def _measured(item: pytest.Item, phase: str) -> Iterator[None]:
    before = _core_seconds()
    try:
        yield
    finally:
        item.stash.setdefault(_CORES, {})[phase] = _core_seconds() - before


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    with _measured(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    with _measured(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    with _measured(item, "teardown"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    report = yield
    report.core_seconds = item.stash.get(_CORES, {}).get(call.when or "", 0.0)
    report.fixtures = [*_fixtures]
    _fixtures.clear()
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    name = f"{fixturedef.baseid or 'tests'}::{fixturedef.argname}"
    began: list[tuple[float, float]] = []

    def note(phase: str) -> None:
        if began:
            seconds, cores = began.pop()
            spent = time.monotonic() - seconds, _core_seconds() - cores
            _fixtures.append((name, phase, *spent))

    # Finalizers run in reverse: this one after the fixture's own, the one below before the fixture's own.
    fixturedef.addfinalizer(lambda: note("teardown"))
    began.append((time.monotonic(), _core_seconds()))
    try:
        return (yield)
    finally:
        note("setup")
        fixturedef.addfinalizer(lambda: began.append((time.monotonic(), _core_seconds())))


@dataclass
class Cost:
    """Seconds of each phase, and core-seconds of all phases."""

    setup: float = 0.0
    call: float = 0.0
    teardown: float = 0.0
    cores: float = 0.0
    count: int = 0

    def add(self, phase: str, seconds: float, cores: float) -> None:
        """Add a phase."""
        setattr(self, phase, getattr(self, phase) + seconds)
        self.cores += cores

    @property
    def seconds(self) -> float:
        """Return the seconds of all phases."""
        return self.setup + self.call + self.teardown


@dataclass(eq=False)  # pytest keeps plugins in a set
class Summary:
    """Sums of all reports of a run, of every test process."""

    files: defaultdict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    folders: defaultdict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    fixtures: defaultdict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in (
            "setup",
            "call",
            "teardown",
        ):  # xdist reports a crashed worker with another phase
            return
        file = report.nodeid.partition("::")[0]
        parts = Path(file).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        cores = getattr(report, "core_seconds", 0.0)
        for cost in (self.files[file], self.folders[folder]):
            cost.add(report.when, report.duration, cores)
            cost.count += report.when == "call"
        for name, phase, seconds, spent in getattr(report, "fixtures", ()):
            self.fixtures[name].add(phase, seconds, spent)
            self.fixtures[name].count += phase == "setup"

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(cost.count for cost in self.files.values()) < MOST:
            return
        for title, costs in (
            ("core-seconds by folder", self.folders),
            ("slowest files", self.files),
            ("slowest fixtures", self.fixtures),
        ):
            terminalreporter.section(title)
            for line in table(costs, by_cores=costs is self.folders):
                terminalreporter.write_line(line)


def table(costs: dict[str, Cost], *, by_cores: bool) -> list[str]:
    """Return a table of the highest costs, by core-seconds or by seconds."""
    ranked = sorted(
        costs.items(), key=lambda row: row[1].cores if by_cores else row[1].seconds, reverse=True
    )
    total = Cost(count=sum(cost.count for cost in costs.values()))
    for cost in costs.values():
        for phase in ("setup", "call", "teardown"):
            total.add(phase, getattr(cost, phase), 0)
        total.cores += cost.cores
    shown = [*(ranked if by_cores else ranked[:MOST]), ("all", total)]
    return [
        f"{'setup':>9} {'call':>9} {'teardown':>9} {'cores':>9} {'times':>6}",
        *(
            f"{cost.setup:8.1f}s {cost.call:8.1f}s {cost.teardown:8.1f}s {cost.cores:8.1f}s"
            f" {cost.count:6}  {name}"
            for name, cost in shown
        ),
    ]
