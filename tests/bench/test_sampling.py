"""Interleaved samples, and the CPU time of other programs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench.sampling import MARK, Neighbours, Samples, in_turn, quantile, timed
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.rounds import BUSY_ROUNDS, ROUNDS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SPINS = "while True: pass"
SPINS_IN_A_CHILD = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}], env={{}})"
)


OWN_MARK = f"A_MARK_OF_{os.getpid()}"  # a benchmark may run beside the tests


@contextlib.contextmanager
def spinning(program: str, *marks: str) -> Iterator[psutil.Process]:
    """Run a program and yield its last descendant, which uses one core."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    environment |= dict.fromkeys(marks, "1")
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        line = [psutil.Process(process.pid)]
        try:
            while not line[-1].cpu_times().user > 0.1:
                line += line[-1].children()
                time.sleep(0.01)
            yield line[-1]
        finally:
            for child in reversed(line):
                child.kill()


def core_seconds_of(process: psutil.Process) -> float:
    """Return the share of a process's CPU time that `Neighbours` counts as other programs'.

    A `Neighbours` with an unused mark counts all CPU time and serves as the reference.
    """
    ours, nobodys = Neighbours(OWN_MARK), Neighbours(f"{OWN_MARK}_OF_NOBODY")
    before = sum(process.cpu_times()[:2])
    while sum(process.cpu_times()[:2]) - before < 0.4:
        time.sleep(0.02)
    first_s, all_s = ours.used_s(), nobodys.used_s()
    others_s = first_s + ours.used_s() / 2  # estimate at the time of `all_s`
    assert all_s >= 0.35
    return 1 - (all_s - others_s) / (sum(process.cpu_times()[:2]) - before)


@pytest.mark.parametrize(
    ("program", "marks", "part"),
    [(SPINS, (), 1.0), (SPINS, (OWN_MARK,), 0.0), (SPINS_IN_A_CHILD, (OWN_MARK,), 0.0)],
    ids=["another program", "a marked one", "a child of a marked one, without the mark"],
)
def test_only_unmarked_processes_count_as_other_programs(
    program: str, marks: tuple[str, ...], part: float
) -> None:
    with spinning(program, *marks) as process:
        # A process of another test may end between two measurements.
        parts = [core_seconds_of(process) for _ in range(9)]
    assert statistics.median(parts) == pytest.approx(part, abs=0.5)


def test_rounds_beside_other_programs_are_discarded() -> None:
    with spinning(SPINS) as other:
        other.suspend()
        process = subprocess.run(
            [sys.executable, "-m", "tests.bench.rounds", str(other.pid)],
            cwd=ROOT,
            env={**os.environ, MARK: "1"},
            check=True,
            capture_output=True,
            text=True,
        )
    samples = Samples.of_json(json.loads(process.stdout))
    kept = samples.seconds["a way"]
    assert samples.busy >= len(BUSY_ROUNDS)
    # If other tests leave too few quiet rounds, the busy rounds come last.
    quiet = kept[: len(kept) - samples.busy] if samples.is_busy_machine else kept
    assert not {*quiet} & {*BUSY_ROUNDS}
    assert len(quiet) <= ROUNDS
    assert "busy" in samples.summary or "other programs" in samples.summary


def test_each_round_runs_every_variant_once_in_nonperiodic_order() -> None:
    ran: list[str] = []
    ways = {name: lambda name=name: ran.append(name) for name in "ab"}
    in_turn(ways, rounds=40, warm_up=0, pause_s=0.0)
    rounds = [*zip(ran[::2], ran[1::2], strict=True)]
    assert len(rounds) >= 40
    assert all({*row} == {*"ab"} for row in rounds)
    first = [names[0] for names in rounds]
    assert first.count("a") == pytest.approx(len(first) / 2, rel=0.3)
    for period in (2, 3, 4):
        assert any({*first[start::period]} == {*"ab"} for start in range(period))
        assert first[period:] != first[:-period]
    again = [*ran]
    ran.clear()
    in_turn(ways, rounds=40, warm_up=0, pause_s=0.0)
    assert ran[:80] == again[:80]


def test_each_variant_runs_after_a_pause() -> None:
    began: list[float] = []
    ways = {name: lambda: began.append(time.perf_counter()) for name in "ab"}
    in_turn(ways, rounds=2, warm_up=0, pause_s=0.05)
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(began))


def test_returned_measurement_replaces_elapsed_time() -> None:
    assert timed(lambda: 12.5) == 12.5
    assert timed(lambda: time.sleep(0.02)) >= 0.02
    assert timed(lambda: 0.0) == 0.0


def test_samples_round_trip_through_json() -> None:
    samples = Samples({"a": [3.0, 1.0, 2.0], "b": [1.0, 2.0, 4.0]}, 2, False, {"bytes": 5})
    assert Samples.of_json(json.loads(json.dumps(samples.to_json()))) == samples
    assert samples.median("a") == 2.0
    assert samples.per_round(lambda a, b: a / b, "a", "b") == [3.0, 0.5, 0.5]
    assert samples.summary == "3 rounds, 2 busy ones left out"


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1),
    st.floats(0, 1),
)
def test_quantile_bounds_its_share_of_values(values: list[float], part: float) -> None:
    result = quantile(values, part)
    assert result in values
    assert sum(value <= result for value in values) >= part * len(values)
