"""Keys of objects: results, responses, requests too large for the queue, and files for the hub's routes."""

from __future__ import annotations

import re

SWEPT = ("results", "responses", "requests")
"""Folders whose objects have a time. What is in `hub` is named for its content and stays, as models do."""
_KEY = re.compile(rf"({'|'.join((*SWEPT, 'hub'))})/[A-Za-z0-9_-][A-Za-z0-9._-]{{0,127}}")
_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OURS = re.compile(rf"results/{_UUID}\.pt|responses/{_UUID}\.json|requests/{_UUID}")
_REQUEST_S = 86_400.0
"""A request may wait longer for its turn than its result is kept, and is deleted by whoever took it."""


def is_key(key: str) -> bool:
    """Whether an object may lie there."""
    return _KEY.fullmatch(key) is not None


def is_ours(key: str) -> bool:
    """Whether a sweep may delete it: a store may be one that its owner keeps other things in."""
    return _OURS.fullmatch(key) is not None


def lifetime_s(folder: str, ttl_s: float) -> float:
    """How long objects of a folder are kept, where results are kept `ttl_s`."""
    return max(ttl_s, _REQUEST_S) if folder == "requests" else ttl_s


def check(key: str) -> None:
    """See that an object may be stored there.

    Raises:
        ValueError: if not.
    """
    if not is_key(key):
        raise ValueError(f"{key[:100]!r} is no key of an object")
