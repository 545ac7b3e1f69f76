"""Documents of a server's state, as in `GET /admin/status`, each with one problem."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ndif.alerts.causes import AlertLimits, Counts, Findings, Increases, ServerObservation, find
from ndif.gateway.openapi import example_of
from ndif.schema.answer import from_plain
from ndif.schema.server_state import Problem, QueueWait, ServerState

NOW = 1_800_000_000.0
_EXAMPLE: dict[str, Any] = example_of(ServerState)


def status() -> dict[str, Any]:
    """Return the example of the API document: one node, one GPU, one running model."""
    return copy.deepcopy(_EXAMPLE)


def waits(
    *, waiting: int = 0, oldest: float | None = None, last_dispatched: float | None = None
) -> list[QueueWait]:
    """Return the queue of the only model."""
    return [QueueWait(status()["models"][0]["repo_id"], "0.8", waiting, oldest, last_dispatched)]


def increases(*, over_s: float = 0.0, **counts: dict[str, float]) -> Increases:
    """Return counts that rose from zero `over_s` seconds ago."""
    history = Increases()
    history.record(NOW - over_s - 10, Counts())
    history.record(NOW - over_s, Counts(**counts))
    if over_s:
        history.record(NOW, Counts(**counts))
    return history


def observation(
    document: dict[str, Any] | None = None, problems: Sequence[Problem] = (), **changes: Any
) -> ServerObservation:
    """Return an observation of a server that is healthy except for the given fields."""
    fields: dict[str, Any] = {
        "at": NOW,
        "server": from_plain(ServerState, status() if document is None else document),
        "problems": problems,
        "waits": waits(),
        "stores": {"broker": True, "objects": True, "accounts": True},
        "disk": (50, 100),
        "nodes": {"gpu-1": NOW},
        "counts": Increases(),
        **changes,
    }
    return ServerObservation(**fields)


def findings_of(
    document: dict[str, Any] | None = None, problems: Sequence[Problem] = (), **changes: Any
) -> Findings:
    """Return the findings for such an observation."""
    return find(observation(document, problems, **changes), AlertLimits())
