"""Steps of jobs as spans: ids, parents and times, and collectors that accept or refuse them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from ndif.schema.step import GATEWAY, QUEUE, REPLICA, RUNNER, Step
from ndif.telemetry.traces import TraceExporter, spans_of
from tests.clients.harness import LocalServer
from tests.conftest import NAME
from tests.gateway.test_bad_input import send_old
from tests.telemetry.store import HANGS, Store
from tests.telemetry.test_metrics import a_record, sample
from tests.waiting import until

pytestmark = pytest.mark.process

ID = "0d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
STEPS = (
    Step("receive", GATEWAY, 9.5, 10.0),
    Step("received", QUEUE, 10.0, 10.25),
    Step("dispatched", QUEUE, 12.5, 13.0),
    Step("running", REPLICA, 12.6, 12.9),
    Step("execute", RUNNER, 12.7, 12.8),
)


def spans(**fields: str) -> dict[str, ReadableSpan]:
    record = replace(a_record(**fields), id=ID, steps=STEPS)
    return {span.name: span for span in spans_of(record)}


def ids_of(span: ReadableSpan) -> tuple[int, int, int | None]:
    """Return the ids of a span's trace, of the span itself and of its parent."""
    assert span.context is not None
    return (
        span.context.trace_id,
        span.context.span_id,
        None if span.parent is None else span.parent.span_id,
    )


def test_span_parent_is_step_of_calling_part() -> None:
    spans_by_name = spans()
    assert {ids_of(span)[0] for span in spans_by_name.values()} == {uuid.UUID(ID).int}
    own = {name: ids_of(span)[1] for name, span in spans_by_name.items()}
    assert len({*own.values()}) == 6
    above = {name: ids_of(span)[2] for name, span in spans_by_name.items()}
    assert above == {
        "job": None,
        "receive": own["job"],
        "received": own["job"],
        "dispatched": own["job"],
        "running": own["dispatched"],
        "execute": own["running"],
    }
    job, run = spans_by_name["job"], spans_by_name["execute"]
    assert (job.start_time, job.end_time) == (9_500_000_000, 13_000_000_000)
    assert (run.start_time, run.end_time) == (12_700_000_000, 12_800_000_000)
    assert job.status.status_code is StatusCode.OK
    assert (job.attributes or {})["ndif.model"] == "org/name"
    assert run.resource.attributes["service.name"] == "ndif-runner"


def test_failed_job_has_error_status() -> None:
    assert spans(status="ERROR")["job"].status.status_code is StatusCode.ERROR


def test_client_may_name_trace_of_its_job() -> None:
    spans_by_name = spans(traceparent=PARENT + "01")
    trace_id, _, above = ids_of(spans_by_name["job"])
    assert f"{trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{above:016x}" == "b7ad6b7169203331"
    assert {ids_of(span)[0] for span in spans_by_name.values()} == {trace_id}
    assert not spans(traceparent=PARENT + "00"), "its client traces nothing"


def test_job_without_steps_is_one_span() -> None:
    (span,) = spans_of(replace(a_record(), id=ID))
    assert (span.start_time, span.end_time) == (10_000_000_000, 13_000_000_000)


def lost() -> float:
    return sample("ndif_telemetry_lost_total", destination="otlp")


def test_collector_gets_configured_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20a%20token,x-scope=ndif"
    )
    with Store() as store:
        exporter = TraceExporter(f"{store.url}/otlp/v1/traces/")
        exporter.record(replace(a_record(), id=ID))
        exporter.close()
        (batch,) = store.taken
    assert batch.target == "/otlp/v1/traces"
    assert batch.headers["authorization"] == "Bearer a token"
    assert batch.headers["x-scope"] == "ndif"


def test_refusing_collector_loses_only_spans() -> None:
    before = lost()
    with Store(behaviour=400) as store:
        exporter = TraceExporter(store.url)
        exporter.record(replace(a_record(), id=ID))
        exporter.close()
        assert store.asked
    assert lost() == before + 1


@pytest.fixture(scope="module")
def collector() -> Iterator[Store]:
    """A collector of traces."""
    with Store() as store:
        yield store


@pytest.fixture(scope="module")
def traced(server_environment: dict[str, str], collector: Store) -> Iterator[LocalServer]:
    """A server that sends spans to the collector."""
    environment = {**server_environment, "NDIF_OTLP_URL": collector.url}
    started = LocalServer(NAME, environment=environment)
    try:
        yield started.ready()
    finally:
        started.stop()


def test_server_sends_trace_for_each_job(traced: LocalServer, collector: Store) -> None:
    parent = PARENT + "01"
    job = send_old(traced, traceparent=parent).json()["id"]
    (batch,) = until(lambda: collector.taken)
    assert batch.target == "/v1/traces"
    assert batch.headers["content-type"] == "application/x-protobuf"
    request = ExportTraceServiceRequest.FromString(batch.body)
    spans_by_name = {
        span.name: (group.resource, span)
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    }
    assert {"job", "receive", "received", "queued", "acquire", "send", "running"} < {*spans_by_name}
    assert {span.trace_id.hex() for _, span in spans_by_name.values()} == {parent.split("-")[1]}
    of_job = {
        attribute.key: attribute.value.string_value
        for attribute in spans_by_name["job"][1].attributes
    }
    assert of_job["ndif.job"] == job
    assert of_job["ndif.status"] == "ERROR"
    services = {
        attribute.value.string_value
        for resource, _ in spans_by_name.values()
        for attribute in resource.attributes
        if attribute.key == "service.name"
    }
    assert {"ndif", "ndif-gateway", "ndif-queue", "ndif-replica", "ndif-runner"} == services


def test_hanging_collector_delays_neither_jobs_nor_shutdown(
    traced: LocalServer, collector: Store
) -> None:
    collector.behaviour = HANGS
    asked = collector.asked
    for _ in range(3):
        job = send_old(traced).json()["id"]
        until(lambda job=job: ended(traced, job))  # type: ignore[misc]
    until(lambda: collector.asked > asked)
    assert traced.stop() == 0


def ended(server: LocalServer, job: str) -> bool:
    status, content = server.get(f"/response/{job}")
    return status == 200 and b'"ERROR"' in content
