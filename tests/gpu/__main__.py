"""`make gpu`: probe the driver, run the GPU tests and measure, in nine minutes; one JSON file, one table.

Usage: python -m tests.gpu [STAGE…]: probe, tests, benchmark, or all. Writes `gpu.json` and each stage's
output to $OUT, or to `build/gpu/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.gpu.recording import write_json

ROOT = Path(__file__).parents[2]
WHOLE_S = 520
"""Seconds for all stages: nine minutes, less what writing and printing take."""
TEST_S = 90
_LAST_LINES = 15
_BAD = ("failed", "wrong values", "running")
"""Outcomes that are shown in red; "running" is a test that was running when its stage was stopped."""


@dataclass(frozen=True)
class Stage:
    """One program of the suite; it writes its results as JSON to the path that it receives."""

    name: str
    command: Callable[[Path, float], list[str]]
    reserved_s: float
    """Seconds that earlier stages reserve for this stage."""


@dataclass
class Outcome:
    """The outcome of one stage, and its results so far."""

    stage: str
    ok: bool
    seconds: float
    problem: str = ""
    results: Any = field(default_factory=dict)


def probe(results: Path, _: float) -> list[str]:
    """Return the command that probes which layer of the confinement stops CUDA."""
    return [sys.executable, "-m", "tests.gpu.probe", "--json", str(results)]


def tests(results: Path, _: float) -> list[str]:
    """Return the command that runs the tests marked `gpu`."""
    return [
        *(sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-v", "-rA", "--durations=0"),
        *("-p", "tests.gpu.recording", f"--timeout={TEST_S}", f"--record={results}"),
        *("-p", "no:cacheprovider", "--color=no"),
    ]


def benchmark(results: Path, limit_s: float) -> list[str]:
    """Return the command that runs the benchmark."""
    return [
        *(sys.executable, "-m", "bench.gpu", "--json", str(results)),
        *("--seconds", str(limit_s)),
    ]


STAGES = (
    Stage("probe", probe, 60),
    Stage("tests", tests, 260),
    Stage("benchmark", benchmark, 180),
)


def limits(stages: Sequence[Stage], left_s: float) -> float:
    """Return the limit of the first of `stages`: the seconds left, without the other stages' reserves."""
    return left_s - sum(stage.reserved_s for stage in stages[1:])


def run(stage: Stage, folder: Path, limit_s: float) -> Outcome:
    """Run one stage to its end or its limit, and read its results."""
    results = folder / f"{stage.name}.json"
    results.unlink(missing_ok=True)
    began = time.monotonic()
    with (folder / f"{stage.name}.log").open("w") as log:
        process = subprocess.Popen(
            stage.command(results, limit_s),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        # Kill the stage's other processes, except model processes: these end with their host.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    took = time.monotonic() - began
    problem = "" if code == 0 else "took too long" if code is None else f"exit code {code}"
    outcome = Outcome(stage.name, code == 0, round(took, 1), problem)
    with contextlib.suppress(OSError, ValueError):
        outcome.results = json.loads(results.read_text())
    return outcome


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print one table of the results of all stages."""
    table = Table(title="GPU suite")
    for heading in ("stage", "what", "outcome", "detail"):
        table.add_column(heading, overflow="fold")
    for outcome in outcomes:
        for row_name, value, detail in outcome.results.get("table", []):
            style = "red" if value in _BAD else None
            table.add_row(*map(escape, (outcome.stage, row_name, value, detail)), style=style)
        value, style = ("done", "bold") if outcome.ok else (outcome.problem, "bold red")
        took = f"{outcome.seconds:.0f} s"
        table.add_row(outcome.stage, "", value, took, style=style, end_section=True)
    console.print(table)


def main() -> None:
    """Run the stages that are named, or every one; exit 1 if one failed."""
    parser = argparse.ArgumentParser(description="Run the GPU suite.")
    parser.add_argument("stage", nargs="*", help="probe, tests, benchmark; default: all")
    named = parser.parse_args().stage
    if unknown := set(named) - {stage.name for stage in STAGES}:
        raise SystemExit(f"There is no stage {', '.join(sorted(unknown))}.")
    stages = [stage for stage in STAGES if not named or stage.name in named]
    folder = Path(os.environ.get("OUT") or ROOT / "build" / "gpu").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 160)
    ends = time.monotonic() + WHOLE_S
    outcomes: list[Outcome] = []
    for number, stage in enumerate(stages):
        limit_s = limits(stages[number:], ends - time.monotonic())
        console.print(f"{stage.name}: at most {limit_s:.0f} s", highlight=False)
        outcome = run(stage, folder, limit_s)
        outcomes.append(outcome)
        if not outcome.ok:
            lines = (folder / f"{stage.name}.log").read_text(errors="replace").splitlines()
            console.print("\n".join(lines[-_LAST_LINES:]), markup=False, highlight=False)
        report = {outcome.stage: asdict(outcome) for outcome in outcomes}
        write_json(folder / "gpu.json", report)
    show(outcomes, console)
    console.print(f"All of it: {folder / 'gpu.json'}", highlight=False)
    for absent in {outcome.results.get("absent", "") for outcome in outcomes} - {""}:
        console.print(absent)
    if not all(outcome.ok for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
