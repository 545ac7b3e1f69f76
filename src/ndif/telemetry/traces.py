"""The exporter of ended jobs' steps as spans, by OTLP over HTTP to a collector.

At a job's end the leader has the steps of all processes, so only the leader sends spans. The id of a job's
trace is the job's id without hyphens, unless the client named another trace.
Sources: https://opentelemetry.io/docs/specs/otlp/ and https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.re import parse_env_headers

from ndif import __version__
from ndif.schema.job_record import JobRecord
from ndif.schema.step import PARTS, Step
from ndif.telemetry.endpoint import Endpoint
from ndif.telemetry.shipper import Shipper, ShippingPolicy

_PATH = "/v1/traces"
_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""OpenTelemetry's environment variable for the headers that a collector requires."""
_POLICY = ShippingPolicy(max_waiting=10_000, max_batch=200)
"""Numbers of jobs; a job takes some kilobytes."""
_NS = 1_000_000_000
_SAMPLED = 1


class TraceExporter:
    """Sends the spans of jobs from a thread; an unavailable collector loses spans but affects no job."""

    def __init__(self, url: str) -> None:
        """Send to the collector at `url`, such as http://collector:4318, with the headers in `_HEADERS`."""
        path = urlsplit(url).path.rstrip("/").removesuffix(_PATH)
        headers = parse_env_headers(os.environ.get(_HEADERS, ""), liberal=True)
        self._endpoint = Endpoint(url, f"{path}{_PATH}", "application/x-protobuf", headers=headers)
        self._shipper: Shipper[JobRecord] = Shipper("otlp", self._send, _POLICY)

    def record(self, record: JobRecord) -> None:
        """Queue the spans of a job that has ended."""
        self._shipper.put(record)

    def close(self) -> None:
        """Send the queued spans, for two seconds at most."""
        self._shipper.close()

    def _send(self, batch: Sequence[JobRecord]) -> None:
        spans = [span for record in batch for span in spans_of(record)]
        if spans:
            self._endpoint.post(encode_spans(spans).SerializeToString())


def spans_of(record: JobRecord) -> Iterator[ReadableSpan]:
    """Yield a span for a job and one for each of its steps; none if the client's trace is not sampled.

    A step's parent is the shortest step of an earlier part of the server during which the step began, or
    else the job.
    """
    trace_id, parent_id, flags = _parent(record)
    if not flags & _SAMPLED:
        return
    whole = Step(
        "job",
        "server",
        min([record.received, *(step.start for step in record.steps)]),
        max([record.ended, *(step.end for step in record.steps)]),
    )
    remote = parent_id and SpanContext(
        trace_id, parent_id, is_remote=True, trace_flags=TraceFlags(flags)
    )
    root = _context(trace_id)
    attributes = {
        "ndif.job": record.id,
        "ndif.model": record.model,
        "ndif.nnsight": record.generation,
        "ndif.status": record.status,
    }
    code = StatusCode.ERROR if record.is_error else StatusCode.OK
    yield _span(whole, root, remote or None, attributes, Status(code))
    contexts = {step: _context(trace_id) for step in record.steps}
    for step, context in contexts.items():
        above = [outer for outer in contexts if _holds(outer, step)]
        nearest = min(above, key=lambda outer: outer.took_s, default=None)
        parent = root if nearest is None else contexts[nearest]
        yield _span(step, context, parent, {"ndif.job": record.id}, Status())


def _parent(record: JobRecord) -> tuple[int, int, int]:
    """Return the ids of a job's trace and parent span, 0 for none, and the trace's flags."""
    if not record.traceparent:
        return uuid.UUID(record.id).int, 0, _SAMPLED
    _, trace_id, span_id, flags = record.traceparent.split("-")
    return int(trace_id, 16), int(span_id, 16), int(flags, 16)


def _context(trace_id: int) -> SpanContext:
    span_id = random.getrandbits(64) or 1
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(_SAMPLED))


def _holds(outer: Step, inner: Step) -> bool:
    is_later = PARTS.index(outer.by) < PARTS.index(inner.by)
    return is_later and outer.start <= inner.start < outer.end


def _span(
    step: Step,
    context: SpanContext,
    parent: SpanContext | None,
    attributes: dict[str, str],
    status: Status,
) -> ReadableSpan:
    start = int(step.start * _NS)
    return ReadableSpan(
        step.name,
        context,
        parent,
        _RESOURCES[step.by],
        attributes,
        kind=SpanKind.SERVER if step.by == "server" else SpanKind.INTERNAL,
        status=status,
        start_time=start,
        end_time=max(start, int(step.end * _NS)),
    )


_RESOURCES = {
    by: Resource(
        {"service.namespace": "ndif", "service.name": name, "service.version": __version__}
    )
    for by, name in (("server", "ndif"), *((part, f"ndif-{part}") for part in PARTS))
}
