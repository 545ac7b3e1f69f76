"""What `ndif start` starts: everything, or one thing."""

from __future__ import annotations

from typing import Literal, get_args

Word = Literal["all", "api", "broker", "object-store", "ray"]
Role = Literal[Word, "worker"]
"""A worker is a further node of a Ray cluster."""

WORDS: tuple[Word, ...] = get_args(Word)
ALONE: tuple[Literal["broker"], Literal["object-store"], Literal["ray"]] = (
    "broker",
    "object-store",
    "ray",
)
"""What runs without a server beside it, in the order in which one needs the other."""
