"""Documents of a server's state, as `GET /admin/status` answers, with one thing wrong."""

from __future__ import annotations

import copy
from typing import Any

from ndif.alerts.causes import Counts, Findings, Increases, Limits, Observation, find
from ndif.control.answers import ServerState

NOW = 1_800_000_000.0
_EXAMPLE: dict[str, Any] = ServerState.model_json_schema()["examples"][0]


def status() -> dict[str, Any]:
    """The example of the API's own document: one node, one GPU, one model that runs."""
    return copy.deepcopy(_EXAMPLE)


def waits(**changes: Any) -> list[dict[str, Any]]:
    """The queue of the one model."""
    (model,) = status()["models"]
    return [
        {
            "model_key": model["model_key"],
            "generation": "0.8",
            "waiting": 0,
            "oldest": None,
            "running": 0,
            "last_dispatched": None,
            **changes,
        }
    ]


def increases(*, over_s: float = 0.0, **counts: dict[str, float]) -> Increases:
    """Counts that grew from nothing, `over_s` seconds ago."""
    made = Increases()
    made.note(NOW - over_s - 10, Counts())
    made.note(NOW - over_s, Counts(**counts))
    if over_s:
        made.note(NOW, Counts(**counts))
    return made


def seen(document: dict[str, Any] | None = None, **changes: Any) -> Observation:
    """A look at a server of which all that is not named is well."""
    fields: dict[str, Any] = {
        "at": NOW,
        "status": status() if document is None else document,
        "waits": waits(),
        "stores": {"broker": True, "objects": True, "accounts": True},
        "disk": (50, 100),
        "nodes": {"gpu-1": NOW},
        "counts": Increases(),
        **changes,
    }
    ServerState.model_validate(fields["status"])
    return Observation(**fields)


def found(document: dict[str, Any] | None = None, **changes: Any) -> Findings:
    """The causes of such a look."""
    return find(seen(document, **changes), Limits())
