"""Sizes as people read them; the model plane shows them, too."""

from __future__ import annotations


def format_size(count: float | None) -> str:
    """Return a number of bytes with a unit: "1.5GiB", or "2MB" where that is exact; "-" for None.

    `ndif.config.units.parse_size` reads it.
    """
    if count is None:
        return "-"
    best = ""
    for base, units in (
        (1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")),
        (1000, ("B", "kB", "MB", "GB", "TB", "PB", "EB")),
    ):
        rest = count
        for unit in units:
            if abs(round(rest, 1)) < base or unit == units[-1]:
                break
            rest /= base
        shown = f"{rest:.1f}".removesuffix(".0") + unit
        if round(rest, 1) == rest:
            return shown
        best = best or shown
    return best
