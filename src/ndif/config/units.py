"""Sizes, durations and GPU counts as people write them: "12GiB", "90s", "2x24GiB"."""

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
"""Text that `parse_size` accepts, as a pattern for JSON Schema."""

DURATION_PATTERN = r"^\s*(\d{1,15}(\.\d{1,15})?\s*(ms|s|m|h|d)\s*)+$"
"""Text that `parse_duration` accepts, as a pattern for JSON Schema."""

_SIZE = re.compile(SIZE_PATTERN)
_DURATION = re.compile(DURATION_PATTERN)
_PART = re.compile(r"([\d.]+)\s*([a-zA-Z]+)")


def parse_size(value: int | str) -> int:
    """Return a number of bytes, given as such or as text like "12GiB" or "500 MB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _SIZE.match(value):
        ((number, unit),) = _PART.findall(value)
        return round(float(number) * _BYTES[unit.lower()])
    raise ValueError('must be a size, like "12GiB", "500MB" or a whole number of bytes')


def parse_duration(value: float | str) -> float:
    """Return a number of seconds, given as such or as text like "90s", "15m" or "1h 30m"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and _DURATION.match(value):
        return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    raise ValueError('must be a duration, like "90s", "15m", "1h 30m" or a number of seconds')


_GPUS = re.compile(r"(?:(\d{1,6})\s*x\s*)?(.*)", re.ASCII | re.IGNORECASE | re.DOTALL)
_MAX_GPUS = 1024


def parse_gpus(text: str) -> tuple[int, ...]:
    """Return the bytes of each GPU that text like `2x24GiB,1x80GiB` declares; none for "" or "0"."""
    if text.strip() in ("", "0"):
        return ()
    gpus: list[int] = []
    for part in text.split(","):
        number, memory = _GPUS.findall(part.strip())[0]
        try:
            each, count = parse_size(memory), int(number or 1)
        except ValueError:
            each = count = 0
        if each < 1 or not 0 < count <= _MAX_GPUS - len(gpus):
            raise ValueError(
                f"{text[:200]!r} does not declare GPUs: {part.strip()[:200]!r} is not COUNTxMEMORY. "
                f"Write 2x24GiB, or 1x80GiB,2x24GiB; at most {_MAX_GPUS} altogether."
            )
        gpus += [each] * count
    return tuple(gpus)


_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_size(count: float | None) -> str:
    """Return a number of bytes as people read it, such as "1.5 GB"; "-" for None."""
    if count is None:
        return "-"
    for unit in _DECIMAL_UNITS:
        if abs(count) < 1000 or unit == _DECIMAL_UNITS[-1]:
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if count >= 100 or unit == "B" else f"{count:,.1f} {unit}"


def format_duration(seconds: float | None) -> str:
    """Return a number of seconds as people read it, such as "0.4 s" or "1 min 15 s"; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    hours = whole // 3600
    if hours < 48:
        return f"{hours} h {whole % 3600 // 60} min"
    return f"{hours // 24} d {hours % 24} h"
