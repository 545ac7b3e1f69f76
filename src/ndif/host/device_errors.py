"""CUDA's error messages, and those among them that mean that a GPU has failed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(
    r"(?:[\w.]+: )?(?P<error>CUDA error(?: on GPU (?P<gpu>\d+))?: (?P<why>.+))", re.ASCII
)
_PROGRAM_ERRORS = (
    "out of memory",
    "device-side assert",
    "invalid device ordinal",
    "no kernel image",
    "invalid argument",
    "invalid resource handle",
    "no CUDA-capable device",
    "driver version is insufficient",
)
"""Errors of the program, which another GPU would report as well."""


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """CUDA's error about a GPU that no longer works."""

    error: str
    gpu: int | None = None
    """The index that the error names; None if it names none: then one of the replica's GPUs has failed."""


def device_failure(lines: Iterable[str]) -> DeviceFailure | None:
    """Return the last line that reports a failed GPU, like `CUDA error: unspecified launch failure`.

    `CUDA error on GPU 2: …` names the GPU by its index among all of the node's.
    """
    failure = None
    for line in lines:
        found = _LINE.match(line)
        if found is not None and not any(why in found["why"] for why in _PROGRAM_ERRORS):
            failure = DeviceFailure(found["error"], int(found["gpu"]) if found["gpu"] else None)
    return failure
