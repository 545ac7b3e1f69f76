"""CUDA errors that report a failed GPU, and the rest period of a failed GPU, which then takes no model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_LINE = re.compile(
    r"(?:[\w.]+: )?(?P<error>CUDA error(?: on GPU (?P<gpu>\d+))?: (?P<why>.+))", re.ASCII
)
_PROGRAM_ERRORS = (
    *("out of memory", "device-side assert", "invalid device ordinal", "no kernel image"),
    *("invalid argument", "invalid resource handle", "no CUDA-capable device"),
    "driver version is insufficient",
)
"""Program errors, which another GPU would report as well."""


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """A CUDA error that reports a failed GPU."""

    error: str
    gpu: int | None = None
    """Index of the GPU; None if the error names none, so that any of the replica's GPUs may have failed."""


def device_failure(lines: Iterable[str]) -> DeviceFailure | None:
    """Return the last line that reports a failed GPU, like `CUDA error: unspecified launch failure`.

    `CUDA error on GPU 2: …` names the GPU by its index among all GPUs of the node.
    """
    failure = None
    for line in lines:
        match = _LINE.match(line)
        if match is not None and not any(why in match["why"] for why in _PROGRAM_ERRORS):
            failure = DeviceFailure(match["error"], int(match["gpu"]) if match["gpu"] else None)
    return failure


MAX_ERRORS = 3
"""Errors within `WINDOW_S` seconds that take a GPU out of placement."""
WINDOW_S = 600.0
COOLDOWN_S = 3600.0
"""Seconds from the last of these errors until the GPU is used again."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """One GPU that is out of placement."""

    until: float
    error: str


@dataclass(frozen=True, slots=True)
class DeviceErrors:
    """Immutable record of GPU errors, each with its time, by GPU name."""

    by_device: Mapping[str, tuple[tuple[float, str], ...]] = field(default_factory=dict)

    def noted(self, devices: Iterable[str], error: str, now: float) -> DeviceErrors:
        """Return the record with an error of these GPUs added and expired errors removed."""
        kept = {
            device: recent
            for device, errors in self.by_device.items()
            if (
                recent := tuple(entry for entry in errors if now - entry[0] < WINDOW_S + COOLDOWN_S)
            )
        }
        return DeviceErrors(
            {**kept, **{device: (*kept.get(device, ()), (now, error)) for device in devices}}
        )

    def withdrawn(self, now: float) -> dict[str, Withdrawal]:
        """Return the GPUs that are out of placement now, by name."""
        withdrawals = {}
        for device, errors in self.by_device.items():
            ends = [
                last + COOLDOWN_S
                for (first, _), (last, _) in zip(errors, errors[MAX_ERRORS - 1 :], strict=False)
                if last - first <= WINDOW_S
            ]
            if ends and now < ends[-1]:
                withdrawals[device] = Withdrawal(ends[-1], errors[-1][1])
        return withdrawals
