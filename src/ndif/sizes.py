"""Human-readable sizes, for the control plane and the model plane."""

from __future__ import annotations


def format_size(count: float | None) -> str:
    """Return bytes in binary units ("1.5GiB"), or in decimal ones if only they are exact; "-" for None.

    `ndif.config.units.parse_size` parses the text.
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
