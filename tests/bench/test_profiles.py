"""Flame graphs of real processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.profiles import drawn, of_scenario, profiled

from tests.waiting import time_passes

pytestmark = pytest.mark.process

SPINS = """
import subprocess, sys, time
def {name}():
    while True:
        sum(range(1000))
{before}
print("ready", flush=True)
{name}()
"""
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
may_look = pytest.mark.skipif(
    os.geteuid() != 0 and _PTRACE.exists() and _PTRACE.read_text().strip() != "0",
    reason="root alone may look at processes here (kernel.yama.ptrace_scope)",
)


@contextlib.contextmanager
def process(program: str) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        try:
            yield started.pid
        finally:
            started.kill()


@may_look
def test_flame_graphs_cover_server_and_children_by_scenario(tmp_path: Path) -> None:
    child = SPINS.format(name="work_of_the_child", before="")
    before = f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)"
    before += "\nchild.stdout.readline()"
    parent = SPINS.format(name="work_of_the_parent", before=before)
    with profiled(tmp_path), process(parent) as pid:
        children = [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        try:
            # py-spy looks for new processes once a second; the first graph must include the child.
            for scenario, servers, for_s in (("jobs", 1, 3.0), ("warm", 2, 0.5)):
                of_scenario(scenario)
                for _ in range(servers):
                    with drawn(pid):
                        time_passes(for_s)
        finally:
            for child_pid in children:
                os.kill(child_pid, 9)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "jobs-1.svg",
        "warm-1.svg",
        "warm-2.svg",
    ]
    graph = (tmp_path / "jobs-1.svg").read_text()
    assert "work_of_the_parent" in graph
    assert "work_of_the_child" in graph


def test_no_flame_graph_is_drawn_without_open_profile(tmp_path: Path) -> None:
    with drawn(os.getpid()):
        pass
    with profiled(tmp_path):
        pass
    with drawn(os.getpid()):
        pass
    assert not [*tmp_path.iterdir()]


def test_profiler_raises_for_ended_process(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    with (
        profiled(tmp_path),
        pytest.raises(RuntimeError, match=f"cannot draw process {ended.pid}"),
        drawn(ended.pid),
    ):
        pytest.fail("There was nothing to draw.")
