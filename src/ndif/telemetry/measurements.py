"""Measurements of single events, under the names that other NDIF servers use, for a store of time series.

Tags have bounded values: a store keeps an index of them. No user, key or address is in a measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

GPU_MEMORY = "GPUMemMetric"
MODEL_LOAD = "ModelLoadTimeMetric"
SUBMISSION = "NetworkStatusMetric"
EXECUTION = "ExecutionTimeMetric"
RESULT = "RequestResponseSizeMetric"
STATUS = "RequestStatusTimeMetric"
PROBE = "ProbeMetric"


class Measurement(NamedTuple):
    """One event, with its values and the labels by which they are summed up."""

    name: str
    tags: Mapping[str, str]
    fields: Mapping[str, int | float | str]
    time_ns: int
    """Unix nanoseconds, later than those before: a store keeps one event of a moment and its tags."""


_put: Callable[[Measurement], None] | None = None
_last_ns = 0


def write_to(put: Callable[[Measurement], None] | None) -> None:
    """Give each measurement to `put` from now on; with None, to nobody."""
    global _put
    _put = put


def measured(name: str, tags: Mapping[str, str], **fields: int | float | str) -> None:
    """Give a measurement of this moment to whoever writes them.

    A field must always have the same type: a store refuses a number that was whole and is no more.
    """
    global _last_ns
    if _put is not None:
        _last_ns = max(_last_ns + 1, time.time_ns())
        _put(Measurement(name, tags, fields, _last_ns))
