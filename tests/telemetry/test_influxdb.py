"""Metrics in InfluxDB: measurements of a server, unusual names, forms of the URL, and failing stores."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from ndif.config.settings import Settings
from ndif.schema.model_key import NEWEST_CLASS, ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.status import Status
from ndif.telemetry import measurements, metrics
from ndif.telemetry.influxdb import endpoint_of, lines, writing
from ndif.telemetry.measurements import Measurement
from ndif.telemetry.model_labels import MODELS
from ndif.telemetry.shipper import ShippingPolicy
from tests.clients.harness import Client, LocalServer, StartedServer
from tests.conftest import NAME, client_environment
from tests.gateway.test_bad_input import send_old
from tests.on_loop import on_loop
from tests.services.influxdb import PASSWORD, USER, InfluxServer
from tests.services.redis import RedisServer
from tests.telemetry.store import HANGS, HANGS_UP, Store
from tests.telemetry.test_metrics import a_record, sample
from tests.waiting import eventually, until

pytestmark = pytest.mark.engine

QUICK = ShippingPolicy(1000, 100, interval_s=0.02, first_pause_s=0.05, longest_pause_s=0.2)
ALL = {
    "GPUMemMetric": {"model", "generation", "status", "bytes", "request_id"},
    "ModelLoadTimeMetric": {"model", "generation", "source", "seconds"},
    "NetworkStatusMetric": {"model", "generation", "wire", "bytes", "request_id"},
    "ExecutionTimeMetric": {"model", "generation", "status", "seconds", "request_id"},
    "RequestResponseSizeMetric": {"model", "generation", "status", "bytes", "request_id"},
    "RequestStatusTimeMetric": {"model", "generation", "status", "seconds", "request_id"},
    "ProbeMetric": {"model", "generation", "outcome", "ok", "seconds"},
}
"""Tags and fields of each measurement."""


@pytest.fixture(scope="module")
def influx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InfluxServer]:
    """An InfluxDB. Each test has its own database."""
    with InfluxServer(tmp_path_factory.mktemp("influxdb")) as server:
        yield server


def options(url: str, **others: Any) -> Settings:
    return Settings(influxdb_url=url, **others)


def a_request(model: str = "org/name") -> Request:
    key = ModelKey(NEWEST_CLASS, model)
    return Request(key, "0.8", Wire.ENVELOPE, b"12345", compress=True, base_url="http://here")


def emit_all(model: str) -> None:
    """Count one event of each kind."""
    MODELS.add_deployed(model, [model])
    request = a_request(model)
    metrics.submitted(request)
    metrics.status_left(request, Status.QUEUED, 0.25)
    metrics.job_ended(a_record(model), 1 << 20)
    metrics.model_loaded(model, "0.8", "disk", 12)
    metrics.probed(model, "0.8", "ok", 0.4)


def lost() -> float:
    return sample("ndif_telemetry_lost_total", destination="influxdb")


# A real InfluxDB


@on_loop
async def test_each_event_is_written_as_a_point(influx: InfluxServer) -> None:
    url = influx.create("events")
    async with writing(options(url), QUICK):
        for _ in range(3):
            emit_all("org/a")
    for name, columns in ALL.items():
        rows = influx.rows("events", name)
        assert len(rows) == 3, name
        assert {*rows[0]} == {"time", *columns}
        assert rows[0]["model"] == "org/a"
    event_rows = {name: influx.rows("events", name)[0] for name in ALL}
    assert event_rows["GPUMemMetric"]["bytes"] == 1 << 20
    assert event_rows["ModelLoadTimeMetric"]["seconds"] == 12
    assert event_rows["ModelLoadTimeMetric"]["source"] == "disk"
    assert event_rows["NetworkStatusMetric"]["bytes"] == 5
    assert event_rows["NetworkStatusMetric"]["wire"] == "envelope"
    assert event_rows["ExecutionTimeMetric"]["seconds"] == 0.3
    assert event_rows["ExecutionTimeMetric"]["status"] == "COMPLETED"
    assert event_rows["RequestResponseSizeMetric"]["bytes"] == 5000
    assert event_rows["RequestStatusTimeMetric"]["seconds"] == 0.25
    assert event_rows["RequestStatusTimeMetric"]["status"] == "QUEUED"
    assert event_rows["ProbeMetric"]["ok"] == 1
    assert event_rows["ProbeMetric"]["seconds"] == 0.4
    # No tag identifies a user, and no tag has a separate value for each job.
    tags = {
        row[0]
        for name in ALL
        for series in influx.query("events", f'SHOW TAG KEYS FROM "{name}"')
        for row in series["values"]
    }
    assert tags == {"model", "generation", "status", "wire", "source", "outcome"}


@on_loop
async def test_unusual_model_names_arrive(influx: InfluxServer) -> None:
    url = influx.create("odd names")
    names = {
        "org/with space": "org/with space",
        "org/a,b=c": "org/a,b=c",
        "org/'single' \"double\"": "org/'single' \"double\"",
        "org/ünï\u2028čødé/模型 🙂": "org/ünï\u2028čødé/模型 🙂",
        r"org\name\,": r"org\name\,",
        "#org": "#org",
        # The line protocol has no newlines in tags; a trailing backslash becomes a space.
        "org/one\ntwo\tthree\r": r"org/one\ntwo\tthree\r",
        "org\\": "org ",
        "org/\ud800": "org/?",
    }
    async with writing(options(url), QUICK):
        for name in names:
            emit_all(name)
    for measurement in ALL:
        models = {row["model"] for row in influx.rows("odd names", measurement)}
        assert models == {*names.values()}, measurement
    assert lost() == 0


@on_loop
async def test_points_wait_for_unavailable_server(
    influx: InfluxServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = lost()
    url = influx.create("away")
    influx.stop()
    try:
        async with writing(options(url), QUICK):
            emit_all("org/a")
            await eventually(lambda: "influxdb fails" in caplog.text)
            await asyncio.to_thread(influx.start)
            await asyncio.to_thread(influx.until, "away", "ModelLoadTimeMetric")
    finally:
        if not influx._process.running:
            influx.start()
    assert all(len(influx.rows("away", name)) == 1 for name in ALL)
    assert lost() == before


@on_loop
async def test_points_wait_for_their_database(
    influx: InfluxServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with writing(options(influx.url("late")), QUICK):
        emit_all("org/a")
        await asyncio.to_thread(until, lambda: "influxdb fails" in caplog.text)
        await asyncio.to_thread(influx.create, "late")
        await asyncio.to_thread(influx.until, "late", "ModelLoadTimeMetric")
    assert "answers 404 Not Found" in caplog.text
    assert "database not found" in caplog.text
    assert PASSWORD not in caplog.text


@on_loop
async def test_wrong_password_is_logged(
    influx: InfluxServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = lost()
    url = influx.create("closed").replace(USER, "mallory")
    async with writing(options(url), QUICK):
        emit_all("org/a")
        await asyncio.to_thread(until, lambda: "answers 401" in caplog.text)
    assert lost() == before + len(ALL)


# A real server


@pytest.fixture(scope="module")
def measured(
    influx: InfluxServer,
    server_environment: dict[str, str],
    tiny_gpt2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """The database of a stopped server that had run a job of each outcome."""
    environment = {**server_environment, "NDIF_INFLUXDB_URL": influx.create("server")}
    server = LocalServer(NAME, environment=environment)
    try:
        server.ready()
        home = tmp_path_factory.mktemp("client")
        client = Client("scenarios_08", NAME, tiny_gpt2, client_environment(server, home, None))
        try:
            client.run("scenario_reads_of_layers_and_logits")
        finally:
            client.close()
        failed(server)
    finally:
        server.stop()
    return "server"


def failed(server: LocalServer) -> str:
    """Run a job that ends as an ERROR; return its id."""
    job: str = send_old(server).json()["id"]
    until(lambda: httpx.get(f"{server.url}/response/{job}").json()["status"] == "ERROR")
    return job


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"ProbeMetric"}))
def test_server_writes_measurements_of_its_jobs(
    influx: InfluxServer, measured: str, name: str
) -> None:
    rows = influx.rows(measured, name)
    assert rows
    assert {*rows[0]} == {"time", *ALL[name]}
    assert {row["model"] for row in rows} == {NAME}
    for row in rows:
        value = row.get("seconds", row.get("bytes"))
        assert value > 0 or name == "RequestStatusTimeMetric"


def test_job_id_is_in_each_of_its_measurements(influx: InfluxServer, measured: str) -> None:
    completed = influx.rows(measured, "RequestResponseSizeMetric")[0]["request_id"]
    for name in ALL.keys() - {"ModelLoadTimeMetric", "ProbeMetric"}:
        assert completed in {row["request_id"] for row in influx.rows(measured, name)}, name
    statuses = influx.rows(measured, "RequestStatusTimeMetric")
    left = [row["status"] for row in statuses if row["request_id"] == completed]
    assert left[0] == "RECEIVED"
    assert {"QUEUED", "RUNNING"} <= {*left}


def test_each_process_of_server_writes_its_measurements(
    influx: InfluxServer,
    redis: RedisServer,
    server_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    redis.command("flushall")
    database = "many processes"
    environment = {
        **server_environment,
        "NDIF_SESSION_ROOT": str(tmp_path),
        "NDIF_BROKER_URL": redis.url,
        "NDIF_CLUSTER_SECRET": "a secret that the processes share",
        "NDIF_INFLUXDB_URL": influx.create(database),
    }
    server = StartedServer(NAME, environment=environment)
    try:
        server.ready()
        until(lambda: send_old(server).status_code == 200)
        # The gateway writes the first measurement, the leader the others.
        for name in ("NetworkStatusMetric", "ModelLoadTimeMetric", "RequestStatusTimeMetric"):
            influx.until(database, name)
    finally:
        server.stop()


@contextmanager
def writing_to(store: Store, environment: dict[str, str]) -> Iterator[LocalServer]:
    server = LocalServer(
        NAME, environment={**environment, "NDIF_INFLUXDB_URL": f"{store.url}/metrics"}
    )
    try:
        yield server.ready()
    finally:
        server.stop()


def timed(server: LocalServer) -> float:
    """Return the duration of a job in seconds."""
    began = time.monotonic()
    failed(server)
    return time.monotonic() - began


def test_failing_store_does_not_delay_jobs(server_environment: dict[str, str]) -> None:
    with Store() as store, writing_to(store, server_environment) as server:

        def has(text: str) -> bool:
            return any(text.encode() in batch.body for batch in store.taken)

        until(lambda: has("ModelLoadTimeMetric"))
        failed(server)  # the first job starts a process of its generation
        usual_s = timed(server)
        outages = (HANGS, HANGS_UP, 401, 404, 500)
        for behaviour in outages:
            store.behaviour, asked = behaviour, store.asked
            began = time.monotonic()
            job = failed(server)
            # Waiting for a hanging store would take 10 s.
            assert time.monotonic() - began < usual_s + 9, behaviour
            until(lambda: store.asked > asked)  # noqa: B023 - it is waited for here
            assert not has(job)
            store.behaviour = 204
            store.released.set()
            until(lambda: has(job))  # noqa: B023
        store.behaviour = 400
        failed(server)
        lines = 'ndif_telemetry_lost_total{destination="influxdb"}'
        until(lambda: lines in httpx.get(f"{server.url}/metrics").text)
        log = "\n".join(server.output)
        assert log.count("influxdb fails") == len(outages), log
        assert log.count("influxdb refuses a batch") == 1, log
        # A hanging store delays the server's shutdown only briefly.
        store.behaviour = HANGS
        store.released.clear()
        failed(server)
        assert server.stop() == 0
        assert any("The last items for influxdb were not sent" in line for line in server.output)


# Forms of the URL, and of the lines


@pytest.mark.parametrize(
    ("before", "path", "token", "target", "authorization"),
    [
        # InfluxDB 1
        ("", "/metrics", "", "/write?db=metrics&precision=ns", None),
        ("ann:p%40ss%2F%3A@", "/m", "", "/write?db=m&precision=ns", "Basic ann:p@ss/:"),
        ("ann@", "/m", "", "/write?db=m&precision=ns", "Basic ann:"),
        # InfluxDB 2 and 3
        ("", "/bucket", "t0k3n==", "/write?db=bucket&precision=ns", "Token t0k3n=="),
        # behind a proxy
        ("", "/influx/m/", "t", "/influx/write?db=m&precision=ns", "Token t"),
        ("", "/a%20b%2Fc", "t", "/write?db=a+b%2Fc&precision=ns", "Token t"),
    ],
)
def test_influxdb_url_forms_are_accepted(
    before: str, path: str, token: str, target: str, authorization: str | None
) -> None:
    with Store() as store:
        url = f"http://{before}127.0.0.1:{store.port}{path}"
        options(url, influxdb_token=token)
        endpoint_of(url, token).post(b"m v=1")
    (batch,) = store.taken
    assert batch.target == target
    assert batch.body == b"m v=1"
    assert batch.headers["content-encoding"] == "gzip"
    sent = batch.headers.get("authorization")
    if sent is not None and sent.startswith("Basic "):
        sent = f"Basic {base64.b64decode(sent.removeprefix('Basic ')).decode()}"
    assert sent == authorization


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("influx:8086/metrics", "is not like"),
        ("http://influx:8086", "is not like"),
        ("http://influx:8086/", "is not like"),
        ("http://influx:0/metrics", "is not like"),
        ("http://influx:x/metrics", "is not like"),
        ("http:///metrics", "is not like"),
        ("http://influx/metrics?u=ann", "is not like"),
        ("http://influx/metrics#x", "is not like"),
        ("http://ann:hunter2@influx/metrics", "exclude each other"),
    ],
)
def test_url_without_database_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        options(url, influxdb_token="token")


def test_url_and_token_are_secrets() -> None:
    parsed = options("https://ann:hunter2@influx/metrics")
    assert "hunter2" not in repr(parsed)
    with_token = options("https://influx/metrics", influxdb_token="t0k3n")
    assert "t0k3n" not in repr(with_token)


def test_measurements_are_encoded_in_line_protocol() -> None:
    text = lines(
        [
            Measurement("M", {"model": "a", "generation": ""}, {"seconds": 1.5, "id": 'x"'}, 7),
            Measurement("M", {"model": "a"}, {"bytes": 3}, 8),
        ]
    )
    assert text == b'M,model=a id="x\\"",seconds=1.5 7\nM,model=a bytes=3i 8'


@on_loop
async def test_nothing_is_measured_without_influxdb() -> None:
    async with writing(Settings()):
        emit_all("org/a")
        assert measurements._put is None


@on_loop
async def test_measurement_times_are_unique() -> None:
    written: list[Measurement] = []
    measurements.write_to(written.append)
    try:
        for _ in range(1000):
            measurements.measured("M", {}, bytes=1)
    finally:
        measurements.write_to(None)
    assert len({measurement.time_ns for measurement in written}) == 1000
    assert abs(written[-1].time_ns - time.time_ns()) < 10**9
