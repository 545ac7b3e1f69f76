"""The report of a simulation: waits, loads, evictions and use, by model, by node, by hour and in total.

Plain values for JSON, which do not depend on the machine that runs the simulation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ndif.schema.model_key import ModelKey
from ndif.simulation.journal import HOUR_S, Journal, Outcome, Usage
from ndif.simulation.world import World

Row = dict[str, Any]
"""A row of the report, by column."""

_Name = tuple[str, str]

_MOST_REASONS = 20
_PARTICULARS = re.compile(r"'[^']*'|\d[\d.,]*")
"""Names and numbers, which differ between two sentences about the same problem."""
_LEVELS = (0.5, 0.9, 0.99)


def report(world: World, journal: Journal, seed: int) -> Row:
    """Return the whole report."""
    outcomes = journal.outcomes
    gpus = {node.id: len(node.resources.gpu_bytes) for node in world.nodes}
    cpu = {node.id: node.resources.cpu_bytes for node in world.nodes}
    nodes = [journal.by_node[node.id] for node in world.nodes]
    span_s = journal.ended_s
    return {
        "trace": {
            "requests": len(outcomes),
            "models": len({outcome.asked.model for outcome in outcomes}),
            "users": len({outcome.asked.user for outcome in outcomes}),
            "last_arrival_s": _round(outcomes[-1].received),
            "ended_s": _round(span_s),
            "seed": seed,
        },
        "overall": {
            **_of_requests(outcomes),
            **_of_replicas(nodes),
            **_use(nodes, sum(gpus.values()), sum(cpu.values()), span_s),
        },
        "errors": _errors(outcomes),
        "models": _models(journal, sum(gpus.values()), span_s),
        "nodes": [
            {
                "node": node.name,
                "gpus": gpus[node.id],
                **_of_replicas([journal.by_node[node.id]]),
                **_use([journal.by_node[node.id]], gpus[node.id], cpu[node.id], span_s),
            }
            for node in world.nodes
        ],
        "hours": _hours(outcomes, nodes, sum(gpus.values()), sum(cpu.values()), span_s),
    }


def _of_requests(outcomes: Sequence[Outcome]) -> Row:
    """Return the outcomes of requests, and the waits of those that ran."""
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


def _of_replicas(usages: Iterable[Usage]) -> Row:
    """Return loads and evictions."""
    usages = list(usages)

    def total(of: Callable[[Usage], float]) -> float:
        return sum(map(of, usages))

    return {
        "cold_loads": total(lambda usage: usage.cold_loads),
        "warm_returns": total(lambda usage: usage.warm_returns),
        "loading_s": _round(total(lambda usage: usage.loading_s)),
        "evicted_to_warm": total(lambda usage: usage.evicted_warm),
        "evicted_to_cold": total(lambda usage: usage.evicted_cold),
        "dropped_from_warm": total(lambda usage: usage.dropped),
        "interrupted": total(lambda usage: usage.interrupted),
    }


def _use(usages: Iterable[Usage], gpus: int, cpu_bytes: int, span_s: float) -> Row:
    """Return the fractions of GPUs busy and held, and of CPU memory held."""
    usages = list(usages)
    return {
        "gpu_utilisation": _part(sum(sum(u.gpus_busy.hours) for u in usages), gpus * span_s),
        "gpus_held": _part(sum(sum(u.gpus_held.hours) for u in usages), gpus * span_s),
        "cpu_memory_held": _part(sum(sum(u.cpu_bytes.hours) for u in usages), cpu_bytes * span_s),
    }


def _models(journal: Journal, gpus: int, span_s: float) -> list[Row]:
    """Return a row for each model in each runtime, the most requested first."""
    outcomes: defaultdict[_Name, list[Outcome]] = defaultdict(list)
    usages: defaultdict[_Name, list[Usage]] = defaultdict(list)
    for outcome in journal.outcomes:
        outcomes[_name(outcome.asked.model, outcome.asked.generation)].append(outcome)
    for variant, usage in journal.by_model.items():
        usages[_name(variant.model, variant.generation)].append(usage)
    rows = []
    for name in sorted({*outcomes, *usages}, key=lambda name: (-len(outcomes[name]), name)):
        busy_s = sum(sum(usage.gpus_busy.hours) for usage in usages[name])
        held_s = sum(sum(usage.gpus_held.hours) for usage in usages[name])
        rows.append(
            {
                "model": name[0],
                "generation": name[1],
                **_of_requests(outcomes[name]),
                **_of_replicas(usages[name]),
                "gpu_utilisation": _part(busy_s, gpus * span_s),
                "gpus_held": _part(held_s, gpus * span_s),
                "busy_while_held": _part(busy_s, held_s),
            }
        )
    return rows


def _name(model: ModelKey, generation: str) -> _Name:
    """Return one name for all keys of one model, and its runtime."""
    revision = f"@{model.revision}" if model.revision else ""
    return f"{model.repo_id.lower()}{revision}", generation


def _errors(outcomes: Iterable[Outcome]) -> list[Row]:
    """Return error messages, the most frequent first; messages that differ in names or numbers are one."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None:
            alike[_PARTICULARS.sub("…", outcome.error)].append(outcome.error)
    found = sorted(alike.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return [{"requests": len(said), "for_example": said[0]} for _, said in found[:_MOST_REASONS]]


def _hours(
    outcomes: Iterable[Outcome], nodes: Sequence[Usage], gpus: int, cpu_bytes: int, span_s: float
) -> list[Row]:
    """Return a row for each hour: its requests, their waits, and the use of memory and GPUs."""
    came: defaultdict[int, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        came[int(outcome.received // HOUR_S)].append(outcome)
    rows = []
    for hour in range(max(int(-(-span_s // HOUR_S)), 1)):
        length_s = min(HOUR_S, span_s - hour * HOUR_S)

        def part(of: Callable[[Usage], list[float]], most: float, hour: int = hour) -> float | None:
            return _part(sum(hours[hour] for hours in map(of, nodes) if hour < len(hours)), most)

        waits = [o.dispatched - o.received for o in came[hour] if o.dispatched is not None]
        rows.append(
            {
                "hour": hour,
                "requests": len(came[hour]),
                "wait_s": _quantiles(waits),
                "gpu_utilisation": part(lambda u: u.gpus_busy.hours, gpus * length_s),
                "gpus_held": part(lambda u: u.gpus_held.hours, gpus * length_s),
                "cpu_memory_held": part(lambda u: u.cpu_bytes.hours, cpu_bytes * length_s),
            }
        )
    return rows


def _quantiles(values: Iterable[float]) -> Row | None:
    """Return percentiles by nearest rank, so that each is a value that occurred; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {
        f"p{level * 100:g}": _round(ordered[-(-int(level * 1000) * len(ordered) // 1000) - 1])
        for level in _LEVELS
    }
    return {**found, "max": _round(ordered[-1])}


def _part(of: float, whole: float) -> float | None:
    return round(of / whole, 6) + 0.0 if whole else None


def _round(seconds: float) -> float:
    return round(seconds, 3) + 0.0
