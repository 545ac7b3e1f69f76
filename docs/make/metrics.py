"""The reference of metrics, from those that the server registers and those that it makes of its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from docs.make.text import cell, code
from prometheus_client import Metric

from ndif.schema.server_state import ScheduleState, ServerState
from ndif.telemetry import metrics, state

_HEAD = """\
# Metrics

Everything at `GET /metrics`. [Monitoring](../monitoring.md#metrics) says what the values of the labels are,
and how to ask.

| metric | type | labels | |
| --- | --- | --- | --- |
"""
_SERVER = ServerState(
    nodes=[],
    models=[],
    problems=[],
    schedule=ScheduleState(
        source=None, problems=[], next_change=None, read_every_s=30.0, windows=[]
    ),
)


@dataclass(frozen=True, slots=True)
class Described:
    """A metric by the name that queries have."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def described() -> list[Described]:
    """Return all metrics, by name."""
    found = (
        Described(
            f"{family.name}_total" if family.type == "counter" else family.name,
            family.type,
            tuple(labels),
            family.documentation,
        )
        for family, labels in (*_counted(), *_of_state())
    )
    return sorted(found, key=lambda each: each.name)


def page() -> str:
    """Return the page."""
    rows = (
        f"| {code(each.name)} | {each.kind} | {', '.join(map(code, each.labels))} | {cell(each.text)} |\n"
        for each in described()
    )
    return _HEAD + "".join(rows)


def _counted() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    for value in vars(metrics).values():
        if hasattr(value, "_labelnames") and hasattr(value, "describe"):
            (family,) = value.describe()
            yield family, value._labelnames


def _of_state() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    families = (
        *state.families(_SERVER),
        *state.stores({}),
        *state.disk((0, 0)),
    )
    for family in families:
        yield family, family._labelnames  # type: ignore[attr-defined]
