"""Which of the errors that CUDA reports say that a GPU has failed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(
    r"(?:[\w.]+: )?(?P<error>CUDA error(?: on GPU (?P<gpu>\d+))?: (?P<why>.+))", re.ASCII
)
_OF_THE_PROGRAM = (
    "out of memory",
    "device-side assert",
    "invalid device ordinal",
    "no kernel image",
    "invalid argument",
    "invalid resource handle",
    "no CUDA-capable device",
    "driver version is insufficient",
)
"""Errors that another card would report as well."""


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """CUDA's error about a GPU that no longer works."""

    error: str
    gpu: int | None = None
    """Its index, where the error names it; else it is one of the replica's."""


def device_failure(lines: Iterable[str]) -> DeviceFailure | None:
    """Find the last line that reports a failed GPU, like `CUDA error: unspecified launch failure`.

    `CUDA error on GPU 2: …` names the GPU by its index among all of the node's.
    """
    failure = None
    for line in lines:
        found = _LINE.match(line)
        if found is not None and not any(why in found["why"] for why in _OF_THE_PROGRAM):
            failure = DeviceFailure(found["error"], int(found["gpu"]) if found["gpu"] else None)
    return failure
