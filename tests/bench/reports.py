"""Reports for tests, of an invented machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.figures import Figure
from bench.report import Report

MACHINE: dict[str, Any] = {
    "cpus": 2,
    "cpu": "a processor",
    "memory_bytes": 16 << 30,
    "kernel": "6.1",
    "python": "3.11",
    "versions": {"ndif": "1.0", "ray": None},
    "commit": "0123456789abcdef",
    "is_dirty": True,
    "load_average": [0.1, 0.2, 0.3],
    "loop_seconds": 0.2,
    "date": "2026-01-02T03:04:05+00:00",
}


def report(*figures: Figure, **machine: object) -> Report:
    return Report({**MACHINE, **machine}, 1e9, 90.0, [*figures])


def sampled(samples: Sequence[float], name: str = "a / b", *, at_most: bool = True) -> Figure:
    figure = Figure.of(name, samples, 2.0, "x", at_most=at_most)
    figure.scenario = "jobs"
    return figure


def once(value: float, name: str = "c", *, at_most: bool = True) -> Figure:
    return Figure(name, value, 10.0, "s", at_most, scenario="jobs")
