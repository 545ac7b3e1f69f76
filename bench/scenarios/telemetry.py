"""The cost of telemetry: all of it compared with none, and `/metrics` of many models and jobs."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.figures import Figure
from bench.scenario import Site
from bench.servers.processes import server
from bench.traces import sample
from ndif.schema.job_record import JobRecord
from ndif.schema.server_state import ModelState, ReplicaStatus, ScheduleState, ServerState
from ndif.schema.states import DeploymentLevel
from ndif.schema.step import QUEUE, Step
from ndif.telemetry import metrics
from ndif.telemetry.exposition import exposition
from ndif.telemetry.model_labels import MODELS
from ndif.telemetry.state import families

_ALL, _NONE = "all telemetry", "none"
_TRACES, _SERIES = 40, 8
_MODELS, _JOBS, _ANSWERS = 200, 10_000, 20


class _Sink(BaseHTTPRequestHandler):
    """A store that accepts every batch at once."""

    def do_POST(self) -> None:
        """Read a batch, and accept it."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def _sink() -> Iterator[str]:
    """Run a store of metrics, logs and traces; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


def measure(site: Site) -> Iterator[Figure]:
    """Measure a server with all logs, metrics and traces, and a server without."""
    with _sink() as url:
        stores = {f"NDIF_{name}_URL": url for name in ("LOKI", "OTLP")}
        variables = {**stores, "NDIF_INFLUXDB_URL": f"{url}/ndif", "NDIF_LOG_FORMAT": "json"}
        with (
            server(site.folder, {**site.environment, **variables}, "--verbose") as (all_, _, _),
            server(site.folder, site.environment) as (none, _, _),
        ):
            ways = {_ALL: {"url": all_}, _NONE: {"url": none}}
            traces = sample("small", none, ways, rounds=_TRACES)
            series = sample("series", none, ways, rounds=_SERIES, warm_up=1)
    how = f"{traces.median(_ALL) * 1e3:.1f} - {traces.median(_NONE) * 1e3:.1f} ms; {traces.summary}"
    added = traces.per_round(lambda measured, least: 1e3 * (measured - least), _ALL, _NONE)
    yield Figure.of(f"small trace, {_ALL} - {_NONE}", added, 1, "ms more", how=how)
    rates = series.per_round(lambda measured, least: least / measured, _ALL, _NONE)
    how = (
        f"{series.median(_ALL):.2f}, {series.median(_NONE):.2f} s for 20 in a row; {series.summary}"
    )
    name = f"jobs a second, {_ALL} / {_NONE}"
    yield Figure.of(name, rates, 0.97, "x", at_most=False, how=how)
    yield from _answers()


def _answers() -> Iterator[Figure]:
    for number in range(_MODELS):
        MODELS.add_deployed(f"org/model-{number}", [f"org/model-{number}"])
    for number in range(_JOBS):
        metrics.job_ended(_job(number), 1 << 20)
    calendar = ScheduleState(
        source=None, problems=[], next_change=None, read_every_s=30, windows=[]
    )
    models = [_model(number) for number in range(_MODELS)]
    server = ServerState(nodes=[], models=models, problems=[], schedule=calendar)
    took = []
    for _ in range(_ANSWERS):
        began = time.perf_counter()
        text, _ = exposition("", families(server))
        took.append(time.perf_counter() - began)
    how = f"{_MODELS} models, {_JOBS} jobs of as many users; median of {_ANSWERS}"
    yield Figure("/metrics", statistics.median(took) * 1e3, 50, "ms", how=how)
    yield Figure("size of /metrics", len(text) / 1e6, None, "MB", how="does not grow with users")


def _job(number: int) -> JobRecord:
    steps = tuple(Step(name, QUEUE, 10.0, 10.1) for name in ("received", "queued", "running"))
    return JobRecord(
        id=str(number),
        user=f"user {number}",
        key="",
        model=f"org/model-{number % _MODELS}",
        generation="0.8",
        status="COMPLETED",
        received=10.0,
        dispatched=10.1,
        ended=11.0,
        execution_s=0.1,
        result_bytes=1000,
        steps=steps,
    )


def _model(number: int) -> ModelState:
    replica = ReplicaStatus(
        replica_id=f"{number}",
        node_id="n1",
        level=DeploymentLevel.HOT,
        state="RUNNING",
        deployed=0.0,
        gpu_mem_bytes_by_id={"0": 1 << 30},
        on_cpu=False,
        dedicated=True,
        done=None,
        total=None,
        request_id=None,
    )
    return ModelState(
        model_key=f"{number}",
        repo_id=f"org/model-{number}",
        revision=None,
        task=None,
        generation="0.8",
        metrics_label=f"org/model-{number}",
        dedicated=True,
        size_bytes=1 << 30,
        desired_replicas=1,
        processor=None,
        waiting=1,
        problem=None,
        replicas=[replica],
    )
