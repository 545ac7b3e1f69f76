"""Sizes and durations as people write them: "12GiB", "90s"."""

from __future__ import annotations

import re

_BYTES = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}

SIZE_PATTERN = r"^\s*\d{1,15}(\.\d{1,15})?\s*([kKmMgGtT][iI]?)?[bB]\s*$"
"""What `size` reads, as a JSON Schema says it."""

DURATION_PATTERN = r"^\s*(\d{1,15}(\.\d{1,15})?\s*(ms|s|m|h|d)\s*)+$"
"""What `duration` reads, as a JSON Schema says it."""

_SIZE = re.compile(SIZE_PATTERN)
_DURATION = re.compile(DURATION_PATTERN)
_PART = re.compile(r"([\d.]+)\s*([a-zA-Z]+)")


def size(value: int | str) -> int:
    """A number of bytes, from one or from text like "12GiB" or "500 MB".

    Raises:
        ValueError: with what is allowed.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _SIZE.match(value):
        ((number, unit),) = _PART.findall(value)
        return round(float(number) * _BYTES[unit.lower()])
    raise ValueError('must be a size, like "12GiB", "500MB" or a whole number of bytes')


def duration(value: float | str) -> float:
    """A number of seconds, from one or from text like "90s", "15m" or "1h 30m".

    Raises:
        ValueError: with what is allowed.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and _DURATION.match(value):
        return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    raise ValueError('must be a duration, like "90s", "15m", "1h 30m" or a number of seconds')
