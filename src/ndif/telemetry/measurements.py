"""Measurements of single events for a time-series store, under the names that other NDIF servers use.

The number of values of a tag is bounded, because a store indexes tags. A measurement contains no user, key
or address.
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
    """One event, with its values and the labels for aggregation."""

    name: str
    tags: Mapping[str, str]
    fields: Mapping[str, int | float | str]
    time_ns: int
    """Unix nanoseconds, increasing: a store keeps only one event for a time and a set of tags."""


_put: Callable[[Measurement], None] | None = None
_last_ns = 0


def write_to(put: Callable[[Measurement], None] | None) -> None:
    """Pass each later measurement to `put`; with None, discard measurements."""
    global _put
    _put = put


def measured(name: str, tags: Mapping[str, str], **fields: int | float | str) -> None:
    """Pass a measurement of the current time to the writer, if there is one.

    A field must always have the same type: a store refuses a float in a field that began with integers.
    """
    global _last_ns
    if _put is not None:
        _last_ns = max(_last_ns + 1, time.time_ns())
        _put(Measurement(name, tags, fields, _last_ns))
