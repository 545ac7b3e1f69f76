"""The cost of telemetry: all of it on beside none, and `/metrics` of many models and jobs."""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.figures import Figure
from bench.processes import client, server
from ndif.schema.job_record import JobRecord
from ndif.schema.step import QUEUE, Step
from ndif.telemetry import metrics
from ndif.telemetry.exposition import exposition
from ndif.telemetry.state import families

_MODELS, _JOBS, _ANSWERS = 200, 10_000, 20


class _Sink(BaseHTTPRequestHandler):
    """A store that takes everything at once."""

    def do_POST(self) -> None:
        """Read a batch, and answer that it was taken."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def _sink() -> Iterator[str]:
    """Run a store of metrics, logs and traces; the value is its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


def telemetry(folder: Path, environment: dict[str, str]) -> Iterator[Figure]:
    """Measure a server that logs, measures and traces all beside one that does not."""
    with _sink() as url:
        stores = {f"NDIF_{name}_URL": url for name in ("LOKI", "OTLP")}
        told = {**stores, "NDIF_INFLUXDB_URL": f"{url}/ndif", "NDIF_LOG_FORMAT": "json"}
        with (
            server(folder, {**environment, **told}, "--verbose") as (all_, _, _),
            server(folder, environment) as (none, _, _),
        ):
            report = json.loads(
                client("two_servers.py", "0.8", none, all_, none, "one layer", "jobs").stdout
            )
    measured, baseline = report["one layer"]
    how = f"{measured * 1e3:.1f} - {baseline * 1e3:.1f} ms, medians of differences in turn"
    yield Figure("a small trace with all telemetry", report["added"] * 1e3, 1, "ms more", how=how)
    measured, baseline = report["jobs"]
    how = f"{measured:.2f} / {baseline:.2f} jobs a second"
    name = "jobs a second, all telemetry / none"
    yield Figure(name, measured / baseline, 0.97, "x", at_most=False, how=how)
    yield from _answers()


def _answers() -> Iterator[Figure]:
    for number in range(_JOBS):
        metrics.job_ended(_job(number), 1 << 20)
    status = {"nodes": [], "problems": [], "models": [_model(each) for each in range(_MODELS)]}
    took = []
    for _ in range(_ANSWERS):
        began = time.perf_counter()
        text, _ = exposition("", families(status))
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


def _model(number: int) -> dict[str, Any]:
    replica = {"state": "RUNNING", "request_id": None, "gpu_mem_bytes_by_id": {"0": 1 << 30}}
    return {
        "repo_id": f"org/model-{number}",
        "revision": None,
        "generation": "0.8",
        "waiting": 1,
        "desired_replicas": 1,
        "replicas": [replica],
    }
