"""The report of a simulation: waits, loads, evictions and use, by model, by node, by hour and in total.

A report consists of plain values for JSON and does not depend on the machine that runs the simulation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ndif.schema.model_key import ModelKey
from ndif.simulation.journal import HOUR_S, Journal, Meter, NodeUsage, RequestOutcome
from ndif.simulation.world import World

Row = dict[str, Any]
"""A row of the report, by column."""

_Name = tuple[str, str]

_MOST_REASONS = 20
_PARTICULARS = re.compile(r"'[^']*'|\d[\d.,]*")
"""Names and numbers, which differ between messages about the same problem."""
_LEVELS = (0.5, 0.9, 0.99)
_ALL = slice(None)


def report(world: World, journal: Journal, seed: int) -> Row:
    """Return the whole report."""
    outcomes = journal.outcomes
    gpus = {node.id: len(node.resources.gpu_bytes) for node in world.nodes}
    cpu = {node.id: node.resources.cpu_bytes for node in world.nodes}
    usages = {node.id: journal.by_node[node.id] for node in world.nodes}
    nodes = list(usages.values())
    totals = sum(gpus.values()), sum(cpu.values()), journal.ended_s
    return {
        "trace": {
            "requests": len(outcomes),
            "models": len({outcome.asked.model for outcome in outcomes}),
            "users": len({outcome.asked.user for outcome in outcomes}),
            "last_arrival_s": _round(outcomes[-1].received),
            "ended_s": _round(journal.ended_s),
            "seed": seed,
        },
        "overall": {
            **_request_figures(outcomes),
            **_replica_figures(nodes),
            **_use(nodes, *totals),
        },
        "errors": _errors(outcomes),
        "models": _models(journal, totals[0] * journal.ended_s),
        "nodes": [
            {
                "node": node.name,
                "gpus": gpus[node.id],
                **_replica_figures([usages[node.id]]),
                **_use([usages[node.id]], gpus[node.id], cpu[node.id], journal.ended_s),
            }
            for node in world.nodes
        ],
        "hours": _hours(outcomes, nodes, *totals),
    }


def _request_figures(outcomes: Sequence[RequestOutcome]) -> Row:
    """Return counts of outcomes, and quantiles of the waits and run times of executed requests."""
    ran = [o for o in outcomes if o.dispatched is not None and o.ended is not None]
    return {
        "requests": len(outcomes),
        "completed": sum(o.ended is not None and o.error is None for o in outcomes),
        "refused": sum(o.error is not None and o.dispatched is None for o in outcomes),
        "failed": sum(o.error is not None and o.dispatched is not None for o in outcomes),
        "unfinished": sum(o.ended is None for o in outcomes),
        "on_cpu": sum(o.on_cpu for o in outcomes),
        "wait_s": _quantiles([(o.dispatched or 0.0) - o.received for o in ran]),
        "run_s": _quantiles([(o.ended or 0.0) - (o.dispatched or 0.0) for o in ran]),
    }


def _replica_figures(usages: Sequence[NodeUsage]) -> Row:
    return {
        "cold_loads": sum(usage.cold_loads for usage in usages),
        "warm_returns": sum(usage.warm_returns for usage in usages),
        "loading_s": _round(sum(usage.loading_s for usage in usages)),
        "evicted_to_warm": sum(usage.evicted_warm for usage in usages),
        "evicted_to_cold": sum(usage.evicted_cold for usage in usages),
        "dropped_from_warm": sum(usage.dropped for usage in usages),
        "interrupted": sum(usage.interrupted for usage in usages),
    }


def _use(
    usages: Sequence[NodeUsage], gpus: int, cpu_bytes: int, length_s: float, hours: slice = _ALL
) -> Row:
    """Return the busy and held fractions of GPUs, and the held fraction of CPU memory, in these hours."""
    return {
        **_gpu_use(usages, gpus * length_s, hours),
        "cpu_memory_held": _fraction(
            _total([u.cpu_bytes for u in usages], hours), cpu_bytes * length_s
        ),
    }


def _gpu_use(usages: Sequence[NodeUsage], gpu_s: float, hours: slice = _ALL) -> Row:
    return {
        "gpu_utilisation": _fraction(_total([u.gpus_busy for u in usages], hours), gpu_s),
        "gpus_held": _fraction(_total([u.gpus_held for u in usages], hours), gpu_s),
    }


def _total(meters: Iterable[Meter], hours: slice = _ALL) -> float:
    return sum(sum(meter.hours[hours]) for meter in meters)


def _models(journal: Journal, gpu_s: float) -> list[Row]:
    """Return a row for each model in each runtime, the most requested first."""
    outcomes: defaultdict[_Name, list[RequestOutcome]] = defaultdict(list)
    usages: defaultdict[_Name, list[NodeUsage]] = defaultdict(list)
    for outcome in journal.outcomes:
        outcomes[_name(outcome.asked.model, outcome.asked.generation)].append(outcome)
    for variant, usage in journal.by_model.items():
        usages[_name(variant.model, variant.generation)].append(usage)
    rows = []
    for name in sorted({*outcomes, *usages}, key=lambda name: (-len(outcomes[name]), name)):
        busy_s = _total(usage.gpus_busy for usage in usages[name])
        held_s = _total(usage.gpus_held for usage in usages[name])
        rows.append(
            {
                "model": name[0],
                "generation": name[1],
                **_request_figures(outcomes[name]),
                **_replica_figures(usages[name]),
                **_gpu_use(usages[name], gpu_s),
                "busy_while_held": _fraction(busy_s, held_s),
            }
        )
    return rows


def _name(model: ModelKey, generation: str) -> _Name:
    """Return a name that all keys of one model share, and the generation."""
    revision = f"@{model.revision}" if model.revision else ""
    return f"{model.repo_id.lower()}{revision}", generation


def _errors(outcomes: Iterable[RequestOutcome]) -> list[Row]:
    """Return error messages, most frequent first; differences in names and numbers are ignored."""
    by_problem: defaultdict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None:
            by_problem[_PARTICULARS.sub("…", outcome.error)].append(outcome.error)
    ranked = sorted(by_problem.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return [
        {"requests": len(sentences), "for_example": sentences[0]}
        for _, sentences in ranked[:_MOST_REASONS]
    ]


def _hours(
    outcomes: Iterable[RequestOutcome],
    nodes: Sequence[NodeUsage],
    gpus: int,
    cpu_bytes: int,
    span_s: float,
) -> list[Row]:
    """Return a row for each hour, with its requests, their waits, and the use of memory and GPUs."""
    by_hour: defaultdict[int, list[RequestOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_hour[int(outcome.received // HOUR_S)].append(outcome)
    rows = []
    for hour in range(max(int(-(-span_s // HOUR_S)), 1)):
        length_s = min(HOUR_S, span_s - hour * HOUR_S)
        waits = [o.dispatched - o.received for o in by_hour[hour] if o.dispatched is not None]
        rows.append(
            {
                "hour": hour,
                "requests": len(by_hour[hour]),
                "wait_s": _quantiles(waits),
                **_use(nodes, gpus, cpu_bytes, length_s, slice(hour, hour + 1)),
            }
        )
    return rows


def _quantiles(values: Iterable[float]) -> Row | None:
    """Return percentiles by nearest rank, which are values that occurred; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    percentiles = {
        f"p{level * 100:g}": _round(ordered[-(-int(level * 1000) * len(ordered) // 1000) - 1])
        for level in _LEVELS
    }
    return {**percentiles, "max": _round(ordered[-1])}


def _fraction(amount: float, whole: float) -> float | None:
    return round(amount / whole, 6) + 0.0 if whole else None


def _round(seconds: float) -> float:
    return round(seconds, 3) + 0.0
