"""A cold start: the time from the request to deploy a model on the disk until the model serves.

The peer is `from_pretrained` in a new process after its imports. In each round the model has a new name and
a new folder; the files are in the page cache in both measurements.
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
        # Beside the checkpoint: hard links work only within a file system.
        tempfile.TemporaryDirectory(dir=site.folder.parent) as scratch,
        machine({}, site.environment) as host,
    ):
        numbers = itertools.count()
        forward_passes: list[float] = []
        ways = {
            _OURS: lambda: _cold_start(host, site.folder, Path(scratch), next(numbers)),
            _PEER: lambda: _from_pretrained(site.folder, forward_passes),
        }
        samples = in_turn(ways, rounds=_ROUNDS, warm_up=1, pause_s=1.0)
    how = (
        f"{samples.median(_OURS):.2f} / {samples.median(_PEER):.2f} s, plus "
        f"{statistics.median(forward_passes):.2f} s for the first forward pass, which reads the weights; "
        f"{samples.summary}"
    )
    ratios = samples.per_round(truediv, _OURS, _PEER)
    yield Figure.of(f"{_OURS} of SmolLM2 / {_PEER}", ratios, 1.3, "x", how=how)


def _cold_start(host: Machine, folder: Path, scratch: Path, number: int) -> float:
    """Return the seconds until an unknown model serves."""
    name = f"bench/cold-{number}"
    linked = shutil.copytree(folder, scratch / str(number), copy_function=os.link)
    took = host.deploy(name, linked)
    host.evict(name, cold=True)
    return took


def _from_pretrained(folder: Path, forward_passes: list[float]) -> float:
    """Return the seconds that a new process needs to load the checkpoint, after its imports.

    Append the seconds of the following forward pass to `forward_passes`.
    """
    process = subprocess.run(
        [sys.executable, "-m", "bench.clients.from_pretrained", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    load_s, forward_s = json.loads(process.stdout)
    forward_passes.append(forward_s)
    return float(load_s)
