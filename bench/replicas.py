"""The throughput of a second replica, each with one thread."""

from __future__ import annotations

import json
from pathlib import Path

from bench.figures import Figure
from bench.processes import client, server


def replicas(folder: Path, environment: dict[str, str]) -> list[Figure]:
    """Measure the time of several jobs on one replica and on two."""
    threads = ("--threads", "1")
    with (
        server(folder, environment, *threads) as (one, _, _),
        server(folder, environment, *threads, "--replicas", "2") as (two, _, _),
    ):
        out = client("jobs.py", "0.8", one, one, two)
        alone, together = json.loads(out.stdout.splitlines()[-1])
    return [
        Figure(
            "two replicas of one thread / one",
            alone / together,
            1.8,
            "x",
            at_most=False,
            how=f"six jobs of 48 tokens, sent at once: {together:.1f} s, on one replica {alone:.1f} s",
        )
    ]
