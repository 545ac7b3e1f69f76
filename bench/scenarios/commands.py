"""Starts: a command's help, and a server in local mode."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from bench.figures import MB, Figure
from bench.sampling import in_turn
from bench.scenario import Site
from bench.servers.processes import NDIF, resident, server
from ndif.config.units import parse_duration

_ROUNDS = 7
_STARTS = 3


def measure(site: Site) -> Iterator[Figure]:
    """Measure the help, and local mode's share of a start and of the memory."""
    samples = in_turn({"help": lambda: _help(site)}, rounds=_ROUNDS, warm_up=1)
    yield Figure.of("ndif --help", samples.seconds["help"], 0.4, "s", how=samples.summary)
    memory, later = [], []
    for _ in range(_STARTS):
        with server(site.folder, site.environment) as (_, pid, output):
            memory.append(resident(pid) / MB)
            match = re.search(r"ready (.+?) later", output)
            if match is None:
                raise RuntimeError(f"The server does not say when it was ready:\n{output}")
            later.append(parse_duration(match[1]))
    how = f"the control plane's process; {_STARTS} starts"
    yield Figure.of("idle server without a model", memory, 120, "MB", how=how)
    how = f"as local mode says; {_STARTS} starts"
    yield Figure.of("ready after the weights are loaded", later, 3, "s", how=how)


def _help(site: Site) -> None:
    subprocess.run([NDIF, "--help"], env=site.environment, check=True, capture_output=True)
