"""Queries of InfluxDB about a server's measurements, each of which has a point for every event.

They are InfluxQL, which InfluxDB 1, 2 and 3 answer. Grafana replaces `$timeFilter`, `$__interval` and
`$__interval_ms`; the slashes in models' names need its form `regex`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deploy.grafana.make.source import Source, Variable


class Events(NamedTuple):
    """A measurement, and its field that has a number."""

    measurement: str
    field: str


ACCEPTED = Events("NetworkStatusMetric", "bytes")
LEFT_STATUS = Events("RequestStatusTimeMetric", "seconds")
EXECUTED = Events("ExecutionTimeMetric", "seconds")
COMPLETED = Events("RequestResponseSizeMetric", "bytes")
PEAK_MEMORY = Events("GPUMemMetric", "bytes")
LOADED = Events("ModelLoadTimeMetric", "seconds")
PROBED = Events("ProbeMetric", "ok")
PROBE_VALUES = Events("ProbeMetric", "seconds")

QUEUED, FAILED = "\"status\" = 'QUEUED'", "\"status\" = 'ERROR'"

_MODELS = (
    f'SHOW TAG VALUES FROM "{ACCEPTED.measurement}", "{LOADED.measurement}" WITH KEY = "model"'
)


def _target(legend: str, query: str) -> dict[str, Any]:
    return {"query": query, "rawQuery": True, "resultFormat": "time_series", "alias": legend}


INFLUXDB = Source(
    type="influxdb",
    tag="ndif-influxdb",
    link="NDIF, InfluxDB",
    target=_target,
    variables=[Variable("model", "Model", _MODELS)],
    points="auto",  # there may be one event, of which there is no line
)


def count(events: Events, where: str = "") -> str:
    """Return how many events there are."""
    return _select(f'count("{events.field}")', events, where)


def greatest(events: Events, where: str = "") -> str:
    """Return the greatest value of all events."""
    return _select(f'max("{events.field}")', events, where)


def quantile(percent: int, events: Events, where: str = "") -> str:
    """Return the value that this part of all events stays below."""
    return _select(f'percentile("{events.field}", {percent})', events, where)


def rate(events: Events, *by: str, where: str = "") -> str:
    """Return how many events there are in a second, by some tags, over time."""
    return _each_second("count", events, by, where)


def sum_rate(events: Events, *by: str, where: str = "") -> str:
    """Return the sum of values in a second, by some tags, over time.

    Seconds in a second are how many jobs there are at once.
    """
    return _each_second("sum", events, by, where)


def over_time(query: str, *by: str) -> str:
    """Return the value of a query in each interval that has events, by some tags."""
    return f"{query} {_group('$__interval', by)} fill(none)"


def hourly(query: str, *by: str) -> str:
    """Return the value of a query in each hour, by some tags; 0 without events."""
    return f"{query} {_group('1h', by)} fill(0)"


def mean(events: Events, *by: str) -> str:
    """Return the mean value of events, by some tags, over time."""
    return over_time(_select(f'mean("{events.field}")', events, ""), *by)


def quantiles(events: Events, where: str = "") -> dict[str, str]:
    """Return three quantiles of all events, over time."""
    return {
        f"{percent}% stay below": over_time(quantile(percent, events, where))
        for percent in (50, 90, 99)
    }


def _each_second(function: str, events: Events, by: tuple[str, ...], where: str) -> str:
    value = f'{function}("{events.field}") * 1000 / $__interval_ms'
    return f"{_select(value, events, where)} {_group('$__interval', by)} fill(0)"


def _select(value: str, events: Events, where: str) -> str:
    conditions = ["$timeFilter", '"model" =~ /^${model:regex}$/', *filter(None, [where])]
    return f'SELECT {value} FROM "{events.measurement}" WHERE {" AND ".join(conditions)}'  # noqa: S608


def _group(interval: str, by: tuple[str, ...]) -> str:
    return "GROUP BY " + ", ".join((f"time({interval})", *(f'"{tag}"' for tag in by)))
