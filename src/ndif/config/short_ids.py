"""Ids of replicas, requests and nodes, shortened for people."""

from __future__ import annotations

from collections.abc import Iterable

_SHORT_ID = 6


def unique_length(ids: Iterable[str]) -> int:
    """Return the number of characters, at least six, by which these ids can be told apart."""
    whole = set(ids)
    longest = max((len(each) for each in whole), default=_SHORT_ID)
    for length in range(_SHORT_ID, longest):
        if len({each[:length] for each in whole}) == len(whole):
            return length
    return longest
