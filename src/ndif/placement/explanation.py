"""A refusal as a sentence for the user who waits for the model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ndif.placement.refusal import BlockReason, PlacementRefusal
from ndif.schema.model_key import Variant

_GB = 1e9
_MINUTE_S = 60
_HOUR_S = 3600
_MOST_NAMED = 4


def explain_refusal(refusal: PlacementRefusal) -> str:
    """Return why the model has no place, which models block it, and when to try again."""
    memory = "CPU memory" if refusal.on_cpu else "GPUs"
    need = f"{_name(refusal.model_key)} needs {_size(refusal.size_bytes)} "
    need += "of CPU memory" if refusal.on_cpu else "on GPUs"
    if refusal.replicas > 1:
        need += f" for each of {refusal.replicas} more replicas"
    if refusal.node_name is None:
        return f"{need}; no node of this server has {memory}."
    if not refusal.blockers:
        most = _size(refusal.capacity_bytes)
        return f"{need}; the largest node, {refusal.node_name}, has {most}."
    room = f"room for {_size(refusal.room_bytes)}" if refusal.room_bytes else "no room"
    reasons = [f"{need}; {refusal.node_name} has {room}", *_reasons(refusal)]
    if refusal.retry_after_s is not None:
        return f"{'; '.join(reasons)}. Try again in {_duration(refusal.retry_after_s)}."
    return f"{'; '.join(reasons)}."


def _reasons(refusal: PlacementRefusal) -> list[str]:
    reasons = []
    if dedicated := _blocked_by(refusal, BlockReason.DEDICATED):
        reasons.append(f"{_names(dedicated)} (dedicated) would have to go")
    if together := _blocked_by(refusal, BlockReason.TOGETHER):
        reasons.append(f"{_names(together)} (asked for together with it) would have to go")
    if young := _blocked_by(refusal, BlockReason.YOUNG):
        verb = "is" if len(young) == 1 else "are"
        until = _duration(max(young.values()))
        reasons.append(f"{_names(young)} {verb} protected for another {until}")
    return reasons


def _blocked_by(refusal: PlacementRefusal, reason: BlockReason) -> dict[str, float]:
    """Return the models that a reason protects, and for how many seconds more."""
    held: dict[str, float] = {}
    for blocker in refusal.blockers:
        if blocker.reason is reason:
            earlier = held.get(blocker.model_key, 0.0)
            held[blocker.model_key] = max(blocker.protected_s, earlier)
    return held


def _names(models: Mapping[str, float]) -> str:
    names = [_name(model_key) for model_key in models]
    if len(names) > _MOST_NAMED:
        names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} others"]
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _name(model_key: str) -> str:
    """Return the name that a user gives a model."""
    try:
        key = Variant.parse(model_key).model
    except ValueError:
        return repr(model_key)
    return repr(key.repo_id) + (f" at revision {key.revision!r}" if key.revision else "")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GB:.1f} GB"


def _duration(seconds: float) -> str:
    """Return a duration for a person, rounded up so that a retry does not come too early."""
    if seconds <= _MINUTE_S:
        return f"{math.ceil(seconds)} s"
    if seconds <= 2 * _HOUR_S:
        return f"{math.ceil(seconds / _MINUTE_S)} min"
    return f"{math.ceil(seconds / _HOUR_S)} h"
