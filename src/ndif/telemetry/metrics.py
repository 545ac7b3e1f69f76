"""The metrics that this server counts: names, labels and buckets, by Prometheus' conventions.

Units are base units. No user, key, address or request is a label. A value that a client chooses is a label
only if it is of a closed set, and counts under `other` otherwise. So the number of series does not grow
with users. Each process counts for itself; processes that share a port expose each other's metrics
(`metrics_folder.py`). Functions of this module also pass each event to the writer of measurements, if there
is one (`measurements.py`). Source: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from ndif.schema.job_record import JobRecord
from ndif.schema.request import Request
from ndif.schema.status import Status
from ndif.telemetry import measurements
from ndif.telemetry.measurements import measured
from ndif.telemetry.model_labels import MODELS, OTHER

# `_created` samples would double the number of samples, and Prometheus ignores them by default.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_MODEL_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120, 600, 1800)
"""Fewer buckets, because each model has its own."""
_LONG_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_BYTES = tuple(float(4**power << 10) for power in range(11))
"""From 1 KiB to 1 GiB, by factors of four."""
_MODEL_BYTES = tuple(float(16**power << 14) for power in range(5))
"""From 16 KiB to 1 GiB, by factors of sixteen."""

JOBS = Counter("ndif_jobs", "Jobs that have ended, by their final status.", ["model", "status"])
EXECUTION = Histogram(
    "ndif_job_execution_seconds",
    "Time that the block of a job ran.",
    ["model"],
    buckets=_MODEL_SECONDS,
)
WAIT = Histogram(
    "ndif_job_wait_seconds",
    "Time from the receipt of a job to its last dispatch to a replica.",
    ["model"],
    buckets=_MODEL_SECONDS,
)
RESULT_BYTES = Histogram(
    "ndif_job_result_bytes",
    "Size of a job's result as sent.",
    ["model"],
    buckets=_MODEL_BYTES,
)
PEAK_MEMORY = Histogram(
    "ndif_job_peak_memory_bytes",
    "Peak memory of a job beyond its model's own: GPU memory, or process memory without a GPU.",
    ["model"],
    buckets=_MODEL_BYTES,
)
STATUS = Histogram(
    "ndif_job_status_seconds",
    "Time that a job spent in a status, observed when the job leaves the status.",
    ["status"],
    buckets=_SECONDS,
)
STEPS = Histogram(
    "ndif_job_step_seconds",
    "Time of a step of a job, by the part of the server that performed it.",
    ["by", "step"],
    buckets=_SECONDS,
)
KILLS = Counter(
    "ndif_runner_kills",
    "Runs that exceeded a limit and were ended, or that crashed.",
    ["limit"],
)
SHARED = Counter("ndif_jobs_shared", "Jobs that shared a forward pass with others.", ["model"])
LOAD = Histogram(
    "ndif_model_load_seconds",
    "Time to start a replica, from disk or from CPU memory.",
    ["model", "source"],
    buckets=_LONG_S,
)
LOAD_FAILURES = Counter("ndif_model_load_failures", "Replicas that did not start.", ["model"])
EVICTIONS = Counter("ndif_evictions", "Replicas that left their device.", ["model", "destination"])
LOST_REPLICAS = Counter("ndif_replicas_lost", "Replicas whose process ended by itself.", ["model"])
CALLBACKS = Counter("ndif_callbacks", "Attempts to deliver a webhook or mail.", ["outcome"])
RETENTION = Counter(
    "ndif_retention_deleted", "Stored objects that expired and were deleted.", ["kind"]
)
REQUESTS = Counter("ndif_http_requests", "HTTP requests.", ["route", "method", "status"])
REQUEST_SECONDS = Histogram(
    "ndif_http_request_seconds",
    "Time until an HTTP request was answered.",
    ["route"],
    buckets=_SECONDS,
)
SUBMITTED_BYTES = Histogram(
    "ndif_submitted_bytes", "Size of the payload of an accepted job.", ["wire"], buckets=_BYTES
)
REFUSALS = Counter("ndif_refusals", "Jobs that were not accepted.", ["reason"])
LOST = Counter(
    "ndif_telemetry_lost",
    "Measurements, log lines and traces that did not reach their store.",
    ["destination"],
)
PROBES = Counter(
    "ndif_probes", "Probes of a model, by their outcome.", ["model", "generation", "outcome"]
)
PROBE_SECONDS = Histogram(
    "ndif_probe_seconds",
    "Time from sending a probe's trace to receiving its value, including the wait in the queue.",
    ["model", "generation"],
    buckets=_SECONDS,
)
WEBSOCKETS = Gauge("ndif_websockets", "Open WebSockets.", ["route"], multiprocess_mode="livesum")

_ROUTES = frozenset(
    (
        *("request", "requests", "response", "results", "subscribe", "ws", "status", "env", "ping"),
        *("connected", "whoami", "usage", "callbacks", "hub", "admin", "metrics", "docs"),
        *("login", "logout", "session", "models", "openapi.json"),
    )
)


def model_label(name: str) -> str:
    """Return a model's label: `OTHER` unless the model was deployed or loaded here."""
    return MODELS.of(name)


def submitted(request: Request) -> None:
    """Count an accepted job and the size of its payload."""
    size = len(request.payload)
    SUBMITTED_BYTES.labels(request.wire.value).observe(size)
    tags = {**_tags_of(request), "wire": request.wire.value}
    measured(measurements.SUBMISSION, tags, bytes=size, request_id=request.id)


def status_left(request: Request, status: Status, seconds: float) -> None:
    """Observe the seconds that a job spent in a status that it has left."""
    STATUS.labels(status.value).observe(seconds)
    tags = {**_tags_of(request), "status": status.value}
    measured(measurements.STATUS, tags, seconds=float(seconds), request_id=request.id)


def job_ended(record: JobRecord, peak_memory: int, limit: str = "") -> None:
    """Count a job that has ended.

    `peak_memory` is in bytes, 0 if unknown. `limit` names the limit that the run exceeded, "" if none.
    """
    model = model_label(record.model)
    tags = {"model": model, "generation": record.generation, "status": record.status}
    JOBS.labels(model, record.status).inc()
    SHARED.labels(model)  # a counter that begins at 0 has a rate from the first shared job on
    if record.dispatched is not None:
        WAIT.labels(model).observe(max(0.0, record.dispatched - record.received))
    if record.execution_s:
        EXECUTION.labels(model).observe(record.execution_s)
        took_s = float(record.execution_s)
        measured(measurements.EXECUTION, tags, seconds=took_s, request_id=record.id)
    if record.status == Status.COMPLETED.value:
        RESULT_BYTES.labels(model).observe(record.result_bytes)
        measured(measurements.RESULT, tags, bytes=record.result_bytes, request_id=record.id)
    for step in record.steps:
        STEPS.labels(step.by, step.name).observe(step.took_s)
    if limit:
        KILLS.labels(limit).inc()
    if peak_memory:
        PEAK_MEMORY.labels(model).observe(peak_memory)
        measured(measurements.GPU_MEMORY, tags, bytes=peak_memory, request_id=record.id)


def model_loaded(model: str, generation: str, source: str, seconds: float) -> None:
    """Observe the seconds in which a replica started; `source` is `disk`, or `cpu` for CPU memory."""
    label = model_label(model)
    LOAD.labels(label, source).observe(seconds)
    tags = {"model": label, "generation": generation, "source": source}
    measured(measurements.MODEL_LOAD, tags, seconds=float(seconds))


def probed(model: str, generation: str, outcome: str, seconds: float | None) -> None:
    """Count a probe, and observe the seconds until its value arrived; None if no value arrived."""
    label = model_label(model)
    PROBES.labels(label, generation, outcome).inc()
    tags = {"model": label, "generation": generation, "outcome": outcome}
    if seconds is None:
        measured(measurements.PROBE, tags, ok=int(outcome == "ok"))
    else:
        PROBE_SECONDS.labels(label, generation).observe(seconds)
        measured(measurements.PROBE, tags, ok=int(outcome == "ok"), seconds=float(seconds))


def deleted(numbers: Mapping[str, int]) -> None:
    """Count expired objects that were deleted, by kind."""
    for kind, number in numbers.items():
        RETENTION.labels(kind).inc(number)


def route_label(path: str) -> str:
    """Return the label of a request's path: its first part if the server has this route, else `OTHER`."""
    first = path.split("/", 2)[1] if path.startswith("/") else ""
    return f"/{first}" if first in _ROUTES else OTHER


def _tags_of(request: Request) -> dict[str, str]:
    return {"model": model_label(request.model.label), "generation": request.generation}
