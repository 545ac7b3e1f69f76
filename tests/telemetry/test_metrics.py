"""Names and values of metrics, of one process and of several that share a folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ndif.gateway.openapi import example_of
from ndif.schema.answer import from_plain
from ndif.schema.job_record import JobRecord
from ndif.schema.server_state import GpuState, MemoryState, ModelState, ServerState
from ndif.schema.step import RUNNER, Step
from ndif.stores.disk import disk_usage
from ndif.telemetry import metrics, state
from ndif.telemetry.exposition import _Families, _lines, exposition
from ndif.telemetry.metrics_folder import VARIABLE, prepare
from ndif.telemetry.model_labels import MODELS, ModelLabels
from ndif.telemetry.state import families
from tests.services.prometheus import promtool

pytestmark = pytest.mark.process

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def a_record(model: str = "org/name", **fields: Any) -> JobRecord:
    defaults = {"status": "COMPLETED", "dispatched": 12.5, "execution_s": 0.3, "result_bytes": 5000}
    defaults |= fields
    return JobRecord(
        "id",
        "ada",
        "key",
        model,
        "0.8",
        received=10.0,
        ended=13.0,
        **defaults,  # type: ignore[arg-type]
    )


def sample(name: str, **labels: str) -> float:
    """Return the value of a sample of this process; 0 if there is none."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


EXAMPLE = from_plain(ServerState, example_of(ServerState))
"""One node with one GPU, and one model with one replica."""


def a_model(name: str, **fields: Any) -> ModelState:
    (model,) = EXAMPLE.models
    (placed,) = model.replicas
    placed = replace(placed, request_id="r", gpu_mem_bytes_by_id={"0": 100})
    model_fields = {"repo_id": name, "waiting": 3, "desired_replicas": 2, "replicas": [placed]}
    model_state = replace(model, **{**model_fields, **fields})
    return replace(model_state, metrics_label=model_state.label)


STATE = replace(
    EXAMPLE,
    nodes=[
        replace(
            EXAMPLE.nodes[0],
            name="here",
            gpus=[GpuState(bytes=80, free_bytes=30, uuid="x", withdrawn=True)],
            cpu=MemoryState(bytes=1000, free_bytes=400),
        )
    ],
    models=[
        a_model("org/a"),
        a_model("org/a", generation="0.7", replicas=[]),
        a_model("org/b", revision="v2"),
    ],
    problems=["There is one."],
)


def values(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (measured.name, frozenset(measured.labels.items())): measured.value
        for family in parse_text(text.decode())
        for measured in family.samples
    }


def test_ended_job_is_counted() -> None:
    model = "org/ended"
    MODELS.add_deployed(model, [model])
    for record, peak in (
        (a_record(model), 1 << 20),
        (a_record(model, status="ERROR", dispatched=None, execution_s=0.0), 0),
    ):
        metrics.job_ended(record, peak)
    assert sample("ndif_jobs_total", model=model, status="COMPLETED") == 1
    assert sample("ndif_jobs_total", model=model, status="ERROR") == 1
    assert sample("ndif_job_wait_seconds_sum", model=model) == 2.5
    assert sample("ndif_job_execution_seconds_count", model=model) == 1
    assert sample("ndif_job_result_bytes_sum", model=model) == 5000
    assert sample("ndif_job_peak_memory_bytes_sum", model=model) == 1 << 20


def test_only_deployed_and_loaded_models_have_labels() -> None:
    labels = ModelLabels(max_loaded=2)
    labels.add_deployed("Org/Deployed", ["org/deployed", "Org/Deployed"])
    for name in ("org/first", "org/second", "org/third"):
        labels.add_loaded(name, [name])
    labels.add_loaded("Org/First", ["org/first"])
    labels.add_deployed("org/late", ["org/late"])
    for name, label in (
        ("org/deployed", "Org/Deployed"),
        ("org/first", "Org/First"),
        ("org/second", "org/second"),
        ("org/third", "other"),
        ("org/late", "org/late"),
        ("org/invented", "other"),
    ):
        assert labels.of(name) == label


def test_routes_share_labels() -> None:
    for path, label in (
        ("/response/7c1e", "/response"),
        ("/hub/org/name/resolve/main/x", "/hub"),
        ("/ws/socket.io/", "/ws"),
        ("/admin/keys/create", "/admin"),
        ("/../etc", "other"),
        ("/", "other"),
        ("", "other"),
        ("/favicon.ico", "other"),
    ):
        assert metrics.route_label(path) == label


def test_server_state_is_exposed_as_metrics() -> None:
    numbers = {
        (measured.name, *measured.labels.values()): measured.value
        for family in families(STATE)
        for measured in family.samples
    }
    assert numbers["ndif_leader_up",] == 1
    assert numbers["ndif_gpu_memory_bytes", "here", "0", "total"] == 80
    assert numbers["ndif_gpu_memory_bytes", "here", "0", "free"] == 30
    assert numbers["ndif_gpu_withdrawn", "here", "0"] == 1
    assert numbers["ndif_cpu_memory_bytes", "here", "free"] == 400
    assert numbers["ndif_queue_depth", "org/a", "0.8"] == 3
    assert numbers["ndif_jobs_running", "org/a", "0.8"] == 1
    assert numbers["ndif_jobs_running", "org/a", "0.7"] == 0
    assert numbers["ndif_replicas", "org/b@v2", "0.8", "RUNNING"] == 1
    assert numbers["ndif_model_gpu_memory_bytes", "org/a", "0.8"] == 100
    assert numbers["ndif_problems",] == 1
    (alone,) = families(None)
    assert [measured.value for measured in alone.samples] == [0]


def test_stores_and_disk_are_exposed_as_metrics(tmp_path: Path) -> None:
    (up,) = state.stores({"broker": True, "objects": False})
    assert [(measured.labels["store"], measured.value) for measured in up.samples] == [
        ("broker", 1),
        ("objects", 0),
    ]
    (disk,) = state.disk(disk_usage(tmp_path))
    total, free = (measured.value for measured in disk.samples)
    assert total > free >= 0
    assert not list(state.disk(disk_usage(tmp_path / "gone")))


def test_metrics_of_many_models_are_bounded() -> None:
    many = replace(STATE, models=[a_model(f"org/{number}") for number in range(700)])
    depth = next(family for family in families(many) if family.name == "ndif_queue_depth")
    assert len(depth.samples) == 501
    assert sum(measured.value for measured in depth.samples) == 3 * 700


def test_steps_and_runner_kills_are_counted() -> None:
    runs = {"by": RUNNER, "step": "execute"}
    before = (
        sample("ndif_job_step_seconds_count", **runs),
        sample("ndif_job_step_seconds_sum", **runs),
    )
    killed = sample("ndif_runner_kills_total", limit="memory")
    step = Step("execute", RUNNER, 10.0, 10.25)
    metrics.job_ended(a_record(steps=(step,)), 0, "memory")
    metrics.job_ended(a_record(), 0)
    assert sample("ndif_job_step_seconds_count", **runs) == before[0] + 1
    assert sample("ndif_job_step_seconds_sum", **runs) == before[1] + 0.25
    assert sample("ndif_runner_kills_total", limit="memory") == killed + 1


@pytest.mark.parametrize("accept", ["", "*/*", OPENMETRICS])
def test_exposition_is_valid_for_prometheus(accept: str) -> None:
    metrics.job_ended(a_record(), 5)
    text, content_type = exposition(accept, families(STATE))
    assert content_type.startswith(
        accept.partition(";")[0] if accept == OPENMETRICS else "text/plain"
    )
    own = re.findall(rb"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    names = {name.decode() for name, _ in own if not name.startswith((b"python_", b"process_"))}
    assert len(names) > 20
    assert all(name.startswith("ndif_") for name in names)
    assert b"_created" not in text
    if accept != OPENMETRICS:
        assert promtool("check", "metrics", content=text) == ""


def odd_families() -> list[Metric]:
    gauge = GaugeMetricFamily("ndif_odd", 'A "help"\nof \\ lines', labels=["model", "kind"])
    for number, value in enumerate((0.1, 1e300, 1e-7, -3, float("inf"), float("-inf"))):
        gauge.add_metric([f'a"b\\c\n{number}, {{é}}=', ""], value)
    counter = CounterMetricFamily("ndif_ups", "Ups.", labels=["of"])
    counter.add_metric(["x"], 12)
    histogram = HistogramMetricFamily("ndif_took_seconds", "Seconds.")
    histogram.add_metric([], [("0.5", 1), ("+Inf", 3)], 4.5)
    return [gauge, counter, histogram, UnknownMetricFamily("ndif_strange", "Strange.", 5)]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_exposition_equals_librarys_encoders(accept: str) -> None:
    registry = CollectorRegistry()
    registry.register(_Families(odd_families()))
    encode, content_type = choose_encoder(accept)
    own = "".join(_lines(odd_families(), is_open=accept == OPENMETRICS))
    read = parse_open if accept == OPENMETRICS else parse_text
    assert [*read(own)] == [*read(encode(registry).decode())]
    assert [line for line in own.splitlines() if line.startswith("#")] == [
        line for line in encode(registry).decode().splitlines() if line.startswith("#")
    ]
    assert exposition(accept)[1] == content_type


COUNTING = """
import sys, time
from ndif.telemetry import metrics
from ndif.gateway.openapi import example_of
from ndif.schema.answer import from_plain
from ndif.schema.job_record import JobRecord
from ndif.schema.server_state import GpuState, MemoryState, ModelState, ServerState
from ndif.telemetry.model_labels import MODELS
MODELS.add_deployed("org/shared", ["org/shared"])
metrics.job_ended(
    JobRecord("id", "ada", "key", "org/shared", "0.8", "COMPLETED", 1.0, 2.0, 3.0, 0.5, 10), 0
)
metrics.WEBSOCKETS.labels("/ws").inc()
print("counted", flush=True)
time.sleep(60)
"""
TELLING = """
import sys
from ndif.telemetry.exposition import exposition
sys.stdout.buffer.write(exposition("")[0])
"""


def test_each_process_exposes_metrics_of_all_processes_in_folder(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").touch()  # a file of an earlier start
    environment = {**os.environ, **prepare(tmp_path)}
    assert environment[VARIABLE] == str(tmp_path)
    assert not list(tmp_path.iterdir())
    with (
        subprocess.Popen(
            [sys.executable, "-c", COUNTING], env=environment, stdout=subprocess.PIPE
        ) as first,
        subprocess.Popen(
            [sys.executable, "-c", COUNTING], env=environment, stdout=subprocess.PIPE
        ) as second,
    ):
        try:
            for process in (first, second):
                assert process.stdout is not None
                assert process.stdout.readline() == b"counted\n"

            def metric_values() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
                process = subprocess.run(
                    [sys.executable, "-c", TELLING], env=environment, capture_output=True
                )
                assert process.returncode == 0, process.stderr
                return values(process.stdout)

            jobs = "ndif_jobs_total", frozenset({("model", "org/shared"), ("status", "COMPLETED")})
            sockets = "ndif_websockets", frozenset({("route", "/ws")})
            metrics_now = metric_values()
            assert (metrics_now[jobs], metrics_now[sockets]) == (2, 2)
            # Counts of an ended process stay; its open connections do not.
            first.send_signal(signal.SIGKILL)
            first.wait()
            metrics_now = metric_values()
            assert (metrics_now[jobs], metrics_now[sockets]) == (2, 1)
        finally:
            for process in (first, second):
                process.kill()
