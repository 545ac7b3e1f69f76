"""A pytest plugin that marks tests by the processes that they start, and runs long tests first.

A test without one of the markers `process`, `engine` or `browser` is marked `unit`, and fails if it starts
a process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

MARKERS = {
    "unit": "stays in its own process; each test without another of these markers",
    "process": "starts processes: servers, model processes, commands, clients",
    "engine": "needs a service: Redis, PostgreSQL, S3, Ray, Prometheus, InfluxDB",
    "browser": "drives a browser",
    "slow": "takes more than ten seconds in all on an idle machine, and so runs first",
}
STARTING = ("process", "engine", "browser")

TOGETHER = {
    "tests/clients/test_adapters.py": "servers",
    "tests/clients/test_clients.py": "servers",
    "tests/clients/test_together.py": "servers",
    "tests/clients/test_untrusted.py": "servers",
    "tests/bench/test_scenario.py": "servers",
    "tests/clients/test_s3.py": "S3",
    "tests/stores/objects/test_objects.py": "S3",
    "tests/stores/objects/test_s3.py": "S3",
    "tests/clients/test_accounts.py": "PostgreSQL",
    "tests/stores/accounts/test_accounts.py": "PostgreSQL",
    "tests/stores/accounts/test_backup.py": "PostgreSQL",
    "tests/stores/accounts/test_sql.py": "PostgreSQL",
    "tests/stores/usage/test_usage.py": "PostgreSQL",
}
"""Files that share servers and clients, and therefore run in one test process."""

_WHOLE_FILE = re.compile(rf"^pytestmark = .*\b({'|'.join(STARTING)})\b", re.MULTILINE)
_EVENTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty")
_LIBRARIES = ("/sbin/ldconfig", "gcc", "/usr/bin/gcc")
"""Programs that `ctypes.util.find_library` runs to find a library, once a process."""
_OWN_PROCESS = os.getpid()
_running: pytest.Item | None = None
_started: list[str] = []
"""Processes that the running test has started."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS and _running is not None and os.getpid() == _OWN_PROCESS:
        if arguments and arguments[0] in _LIBRARIES:  # a fork runs no test
            return
        _started.append(f"{event} {arguments[:2]!r:.200}")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if not config.getoption("numprocesses", None):
        sys.addaudithook(_audit)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without unit tests if only unit tests are selected: imports are slow."""
    if config.option.markexpr == "unit" and collection_path.name.startswith("test_"):
        return True if _WHOLE_FILE.search(collection_path.read_text()) else None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests without a marker as unit tests, and sort by marker: no run may end with a slow test."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in STARTING):
            item.add_marker("unit")
    ranks: dict[str, int] = {}
    for item in items:
        scope = scope_of(item.nodeid)
        ranks[scope] = min(ranks.get(scope, 9), _rank(item))
    items.sort(key=lambda item: ranks[scope_of(item.nodeid)])


def _rank(item: pytest.Item) -> int:
    names = ("slow", "engine", "browser", "process", "unit")
    return next(i for i, name in enumerate(names) if item.get_closest_marker(name))


def scope_of(nodeid: str) -> str:
    """Return the name of a group of tests that run in the same process, one after the other."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file, file)


class ByFile(LoadFileScheduling):
    """Gives each test process one file at a time, and all files of a group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    global _running
    _running = item
    _started.clear()
    try:
        return (yield)
    finally:
        _running = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    report = yield
    if _started:
        if item.get_closest_marker("unit") and report.passed:
            report.outcome = "failed"
            report.longrepr = (
                f"a unit test started a process ({_started[0]}): "
                f"mark it {', '.join(STARTING[:-1])} or {STARTING[-1]}"
            )
        _started.clear()
    return report
