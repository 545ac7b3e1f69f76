"""A cold start: from the request to deploy a model that lies on the disk until it serves.

The peer is `from_pretrained` in a new process that has imported everything. In each round the model has a
name and a folder that the server does not know; the files are in the page cache on both sides.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from operator import truediv
from pathlib import Path

from bench.figures import Figure
from bench.sampling import in_turn
from bench.scenario import Site
from bench.servers.machine import Machine, machine
from bench.servers.processes import ROOT

_ROUNDS = 4
_OURS, _PEER = "cold start", "from_pretrained"


def measure(site: Site) -> Iterator[Figure]:
    """Measure both in turn, on a server without a model."""
    with (
        # Beside the checkpoint: a link reaches no other file system.
        tempfile.TemporaryDirectory(dir=site.folder.parent) as scratch,
        machine({}, site.environment) as one,
    ):
        numbers = itertools.count()
        forward_passes: list[float] = []
        ways = {
            _OURS: lambda: _cold_start(one, site.folder, Path(scratch), next(numbers)),
            _PEER: lambda: _from_pretrained(site.folder, forward_passes),
        }
        samples = in_turn(ways, rounds=_ROUNDS, warm_up=1, pause_s=1.0)
    how = (
        f"{samples.median(_OURS):.2f} / {samples.median(_PEER):.2f} s, to which its first forward pass, "
        f"which reads the weights, adds {statistics.median(forward_passes):.2f} s; {samples.said}"
    )
    ratios = samples.each(truediv, _OURS, _PEER)
    yield Figure.of(f"{_OURS} of SmolLM2 / {_PEER}", ratios, 1.3, "x", how=how)


def _cold_start(one: Machine, folder: Path, scratch: Path, number: int) -> float:
    """Return the seconds until a model serves of which nothing is known or loaded."""
    name = f"bench/cold-{number}"
    linked = shutil.copytree(folder, scratch / str(number), copy_function=os.link)
    took = one.deploy(name, linked)
    one.evict(name, cold=True)
    return took


def _from_pretrained(folder: Path, forward_passes: list[float]) -> float:
    """Return the seconds that a new process loads the checkpoint, once all is imported.

    Those of the forward pass that follows are added to `forward_passes`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "bench.clients.from_pretrained", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    load_s, forward_s = json.loads(done.stdout)
    forward_passes.append(forward_s)
    return float(load_s)
