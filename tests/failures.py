"""A pytest plugin that adds diagnostics to a failed run.

A failed test prints the last lines of the servers that it used; a test that hangs prints the stacks of all
its processes. The run ends with the machine's load, and with everything that was tried a second time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import family

LINES = 30
_PY_SPY = Path(sys.executable).with_name("py-spy")
_STACKS = pytest.StashKey[str]()
_BEGAN = pytest.StashKey[float]()
_RETRIED = "retried"

retried: list[str] = []
"""Names of everything that this process tried a second time, with the reason."""


def retry(subject: str, reason: str) -> None:
    """Record a second try for the summary at the end of the run."""
    retried.append(f"{subject}: {reason}")


def stacks(pid: int | None = None) -> str:
    """Return the stacks of a process and of its descendants that run Python."""
    sections = []
    for number in family(pid or os.getpid()):
        if number == os.getpid():
            continue
        try:
            process = psutil.Process(number)
            command = " ".join(process.cmdline())
            dumped = subprocess.run(
                [_PY_SPY, "dump", "--nonblocking", "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=60,
            )
        except (psutil.Error, OSError, subprocess.TimeoutExpired):
            continue
        if "python" in command:
            sections.append(
                f"--- {process.pid} {process.status()} {command[:150]}\n{dumped.stdout}"
            )
    return "\n".join(sections)


def last_lines_of_servers(since: float) -> list[tuple[str, str]]:
    """Return a title and the last lines of each server that runs or has printed a line since then."""
    from tests.clients.harness import LocalServer

    sections = []
    for server in [*LocalServer.recent]:
        if server.process.poll() is not None and server.printed_at < since:
            continue
        lines = [*server.output]
        name = " ".join(map(str, server.process.args[1:4]))  # type: ignore[index]
        sections.append((f"{name}: its last lines", "\n".join(lines[-LINES:])))
        of_models = [line for line in lines if "model process" in line][-LINES:]
        if of_models:
            sections.append((f"{name}: of its model processes", "\n".join(of_models)))
    return sections


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_BEGAN] = time.monotonic()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, Any, Any]:
    """Take the stacks of a hung test's processes before the test fails and its servers end."""
    answer = yield
    ours = signal.getsignal(signal.SIGALRM)
    if callable(ours):

        def expired(number: int, frame: Any) -> None:
            item.stash[_STACKS] = "".join(traceback.format_stack(frame)) + stacks()
            ours(number, frame)

        signal.signal(signal.SIGALRM, expired)
    return answer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections += last_lines_of_servers(item.stash.get(_BEGAN, 0.0))
        if _STACKS in item.stash:
            report.sections.append(("stacks of its processes", item.stash[_STACKS]))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_RETRIED] = retried


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    retried.extend(getattr(node, "workeroutput", {}).get(_RETRIED, ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("this run")
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    terminalreporter.write_line(
        f"load of the last 1, 5 and 15 minutes: {load}, on {os.cpu_count()} cores"
    )
    terminalreporter.write_line(f"tried a second time: {len(retried)}")
    for retry_line in retried:
        terminalreporter.write_line(f"  {retry_line}")
