"""`make bench`: measure scenarios, compare each figure with its limit, print a table, write JSON.

Usage: python -m bench [SCENARIO...]; `--help` lists the scenarios and options.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from rich.console import Console

from bench.figures import Figure, table
from bench.machine_state import loop_seconds, machine_state
from bench.profiles import of_scenario, profiled
from bench.report import LATEST, RESULTS, Report
from bench.scenario import Scenario, Server, Site
from bench.scenarios import FULL, QUICK


def measure(names: list[str], site: Site) -> Iterator[Figure]:
    """Measure scenarios, one after the other, and print each figure at once."""
    for name in names:
        of_scenario(name)
        scenario = cast("Scenario", importlib.import_module(f"bench.scenarios.{name}"))
        began = time.monotonic()
        for figure in scenario.measure(site):
            figure.scenario = name
            print(*figure.row(), sep="  ", flush=True)
            yield figure
        print(f"({name} took {time.monotonic() - began:.0f} s)", flush=True)


def main() -> None:
    """Measure the selected scenarios; exit 1 if a limit does not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join((*QUICK, *FULL)))
    parser.add_argument("--full", action="store_true", help="also those that take longer")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=Server.parse,
        metavar="NAME=URL[#KEY][@NNSIGHT]",
        help="another server with the demo model, to measure in turn with ours; of clients of this nnsight",
    )
    parser.add_argument("--seconds", type=float, help="how long a load lasts, where there is one")
    parser.add_argument("--profile", action="store_true", help="draw flame graphs of the servers")
    parser.add_argument("--output", type=Path, default=LATEST)
    options = parser.parse_args()
    names = options.scenarios or [*QUICK, *(FULL if options.full else ())]
    if unknown := {*names} - {*QUICK, *FULL}:
        parser.error(f"There is no scenario {', '.join(sorted(unknown))}.")
    RESULTS.mkdir(exist_ok=True)
    site = Site.here(options.peer, options.seconds, full=options.full)
    before, began = machine_state(), time.time()
    with profiled(RESULTS) if options.profile else contextlib.nullcontext():
        figures = [*measure(names, site)]
    shown = table("ndif", figures)
    shown.caption = f"a loop of five million steps takes {loop_seconds():.2f} s on this machine now"
    Console(width=160).print(shown)
    Report(before, began, time.time() - began, figures).write(options.output)
    if not all(figure.holds for figure in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
