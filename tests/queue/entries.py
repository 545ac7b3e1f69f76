"""A minimal waiting request for tests of the queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A queue's `Entry` with given fields."""

    id: str
    user: str
    arrived: float
    weight: float = 1.0
    priority: bool = False
    cost: float = 1.0
