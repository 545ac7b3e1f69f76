"""Parsing and formatting of sizes, durations and GPU counts: "12GiB", "1h 30m", "2x24GiB"."""

from __future__ import annotations

import contextlib
import math
import re
from enum import Enum


class Unit(Enum):
    """Unit of a number that is written as a size or a duration."""

    BYTES = "bytes"
    SECONDS = "seconds"


_BYTES = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "pb": 1000**5,
    "eb": 1000**6,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
    "pib": 1024**5,
    "eib": 1024**6,
}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}

SIZE_PATTERN = r"^\s*\d{1,15}(\.\d{1,15})?\s*([kKmMgGtTpPeE][iI]?)?[bB]\s*$"
"""JSON Schema pattern of the text that `parse_size` accepts."""

DURATION_PATTERN = r"^\s*(\d{1,15}(\.\d{1,20})?\s*(ms|s|m|h|d)\s*)+$"
"""JSON Schema pattern of the text that `parse_duration` accepts."""

_SIZE = re.compile(SIZE_PATTERN)
_SHARE = re.compile(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*%\s*", re.ASCII)
_NUMBER = re.compile(r"\d{1,15}")
_DURATION = re.compile(DURATION_PATTERN)
_PART = re.compile(r"([\d.]+)\s*([a-zA-Z]+)")


def parse_size(value: int | str) -> int:
    """Return the bytes in a whole number or in text like "12GiB" or "500 MB"; raise a ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _SIZE.match(value):
        ((number, unit),) = _PART.findall(value)
        return round(float(number) * _BYTES[unit.lower()])
    raise ValueError('must be a size, like "12GiB", "500MB" or a whole number of bytes')


def read_size(value: int | str) -> int:
    """Return the bytes like `parse_size`, and accept a bare number as text, as in the environment."""
    is_number = isinstance(value, str) and _NUMBER.fullmatch(value)
    return parse_size(int(value) if is_number else value)


def parse_limit(text: str) -> int | float | None:
    """Return the bytes of text like "500GB", the fraction of text like "80%", or None for "".

    Raise a ValueError for other text.
    """
    if not text.strip():
        return None
    if (share := _SHARE.fullmatch(text)) is None:
        return read_size(text)
    if 0 < float(share[1]) <= 100:
        return float(share[1]) / 100
    raise ValueError("must be a size, like 500GB, or a share of the disk up to 100%, like 80%")


def parse_duration(value: float | str) -> float:
    """Return the seconds in a number or in text like "90s", "15m" or "1h 30m"; raise a ValueError."""
    if isinstance(value, int | float):
        if math.isfinite(value) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, str) and _DURATION.match(value):
        return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    raise ValueError('must be a duration, like "90s", "15m", "1h 30m" or a number of seconds')


def read_duration(value: float | str) -> float:
    """Return the seconds like `parse_duration`, and accept a bare number as text, as in the environment."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return parse_duration(value)


_GPUS = re.compile(r"(?:(\d{1,6})\s*x\s*)?(.*)", re.ASCII | re.IGNORECASE | re.DOTALL)
_MAX_GPUS = 1024
_MIN_BARE_MEMORY = 1024**2


def parse_gpus(text: str) -> tuple[int, ...]:
    """Return the bytes of each GPU that text like `2x24GiB,1x80GiB` declares; () for "" or "0".

    Raise a ValueError for invalid text or more than 1024 GPUs.
    """
    if text.strip() in ("", "0"):
        return ()
    gpus: list[int] = []
    for part in text.split(","):
        number, memory = _GPUS.findall(part.strip())[0]
        try:
            size, count = read_size(memory), int(number or 1)
        except ValueError:
            size = count = 0
        # A bare number below 1 MiB probably means a count of GPUs, or GiB.
        if size < (
            _MIN_BARE_MEMORY if memory.isdecimal() else 1
        ) or not 0 < count <= _MAX_GPUS - len(gpus):
            raise ValueError(
                f"{text[:200]!r} does not declare GPUs: {part.strip()[:200]!r} is not COUNTxMEMORY. "
                f"Write 2x24GiB, or 1x80GiB,2x24GiB; at most {_MAX_GPUS} altogether."
            )
        gpus += [size] * count
    return tuple(gpus)


def format_duration(seconds: float | None) -> str:
    """Return seconds as rounded text, such as "0.4s" or "1m 15s"; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    if whole < 3600:
        return _parts(whole, "m", 60, "s", 1)
    if whole < 48 * 3600:
        return _parts(whole, "h", 3600, "m", 60)
    return _parts(whole, "d", 86400, "h", 3600)


def _parts(seconds: int, long: str, of_long: int, short: str, of_short: int) -> str:
    rest = seconds % of_long // of_short
    return f"{seconds // of_long}{long}" + (f" {rest}{short}" if rest else "")


def format_exactly(number: float, unit: Unit) -> str:
    """Return text that parses to exactly this number of bytes or seconds, in the largest whole unit."""
    units = _BYTES if unit is Unit.BYTES else _SECONDS
    names = _EXACT_SIZES if unit is Unit.BYTES else tuple(reversed(_SECONDS))
    for name in names:
        count = number / units[name.lower()]
        if count >= 1 and count.is_integer() and count * units[name.lower()] == number:
            return f"{count:.0f}{name}"
    return f"{number}".removesuffix(".0") + (names[-1] if unit is Unit.BYTES else "s")


_EXACT_SIZES = ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB", "B")
