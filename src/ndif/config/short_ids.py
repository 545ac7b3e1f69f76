"""Abbreviation of the ids of replicas, requests and nodes."""

from __future__ import annotations

from collections.abc import Iterable

_SHORT_ID = 6


def unique_length(ids: Iterable[str]) -> int:
    """Return the length, at least six, of the shortest prefixes that distinguish these ids."""
    whole = set(ids)
    longest = max((len(identifier) for identifier in whole), default=_SHORT_ID)
    for length in range(_SHORT_ID, longest):
        if len({identifier[:length] for identifier in whole}) == len(whole):
            return length
    return longest


def matching_ids(given: str, ids: Iterable[str]) -> list[str]:
    """Return the ids that begin with `given`, sorted; only `given` itself if it is one of them."""
    matches = sorted({identifier for identifier in ids if identifier.startswith(given)})
    return [given] if given in matches else matches
