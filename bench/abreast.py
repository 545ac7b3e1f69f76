"""The control plane of two commits, measured together: `python -m bench.abreast A [B]`; B defaults to HEAD.

Two reports in sequence differ by other work on the machine, by up to 15 %. Therefore both servers run at
once, each from a clean checkout, and the same clients load them in turn, in short rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.services.process import free_port

from bench.clients.load import Load, loads_in_turn
from bench.clients.user import SMALL, User
from bench.sampling import MARK, quantile
from bench.servers.no_op import running, runs
from bench.servers.processes import ROOT

_USERS = 32
_JOBS = 960
_DRAWS = 2000


def main() -> None:
    """Compare two commits, and print the ratio of their rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "commits", nargs="+", metavar="COMMIT", help="one or two; the second is HEAD"
    )
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each")
    given = parser.parse_args()
    first, second = [*given.commits, "HEAD"][:2]
    names = {"A": first, "B": second}
    os.environ[MARK] = "abreast"  # neither server counts as another program's work
    with contextlib.ExitStack() as stack:
        loads = {
            way: Load([User(port) for _ in range(_USERS)], SMALL, _JOBS)
            for way, commit in names.items()
            for port in [stack.enter_context(_server(commit))]
        }
        samples = loads_in_turn(loads, given.rounds)
    for way, commit in names.items():
        print(f"{way}  {commit:12} {_JOBS / samples.median(way):7.0f} requests/s, median")
    ratios = samples.per_round(lambda a, b: a / b, "A", "B")
    low, high = interval(ratios)
    print(
        f"B / A  {statistics.median(ratios):.3f}, 95 % from {low:.3f} to {high:.3f}; {samples.summary}"
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median by the bootstrap (Efron, Annals of Statistics 7, 1979)."""
    dice = random.Random(0)
    drawn = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(_DRAWS))
    return quantile(drawn, 0.025), quantile(drawn, 0.975)


@contextlib.contextmanager
def _server(commit: str) -> Iterator[int]:
    """Run `bench.servers.control` of a clean checkout; yield its port."""
    with tempfile.TemporaryDirectory(prefix="abreast-") as root:
        checkout, port = Path(root) / "checkout", free_port()
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), commit], check=True)
        try:
            variables = {
                "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}",
                "NDIF_SESSION_ROOT": root,
                "NDIF_DEV_MODE": "true",
                "NDIF_MAX_CHANNELS_PER_ADDRESS": "100000",
            }
            command = ["bench.servers.control", root, str(port)]
            with running(command, variables, partial(runs, port, 1), checkout):
                yield port
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


if __name__ == "__main__":
    sys.exit(main())
