"""Withdrawal of GPUs from placement after errors that replicas reported: a pure decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MOST = 3
"""Errors within `WITHIN_S` seconds that take a GPU out of placement."""
WITHIN_S = 600.0
REST_S = 3600.0
"""Seconds from the last of these errors until the GPU is used again."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """One GPU that is out of placement."""

    until: float
    """Unix seconds."""
    error: str
    """The last error."""


@dataclass(frozen=True, slots=True)
class DeviceErrors:
    """Immutable record of GPU errors, each with its time, by GPU name."""

    by_device: Mapping[str, tuple[tuple[float, str], ...]] = field(default_factory=dict)

    def noted(self, devices: Iterable[str], error: str, now: float) -> DeviceErrors:
        """Note an error of these GPUs, and forget those that no longer matter."""
        known = {
            device: recent
            for device, errors in self.by_device.items()
            if (recent := tuple(e for e in errors if now - e[0] < WITHIN_S + REST_S))
        }
        return DeviceErrors(
            {**known, **{one: (*known.get(one, ()), (now, error)) for one in devices}}
        )

    def withdrawn(self, now: float) -> dict[str, Withdrawal]:
        """Return the GPUs that take no replica now."""
        found = {}
        for device, errors in self.by_device.items():
            ends = [
                last + REST_S
                for (first, _), (last, _) in zip(errors, errors[MOST - 1 :], strict=False)
                if last - first <= WITHIN_S
            ]
            if ends and now < ends[-1]:
                found[device] = Withdrawal(ends[-1], errors[-1][1])
        return found
