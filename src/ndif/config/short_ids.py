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


def matching_ids(given: str, ids: Iterable[str]) -> list[str]:
    """Return the ids that begin with what was given, or that one alone which it is."""
    found = sorted({each for each in ids if each.startswith(given)})
    return [given] if given in found else found
