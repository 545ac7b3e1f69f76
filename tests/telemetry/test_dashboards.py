"""Each query of the dashboards and alerts has an answer, for a real server that was in use.

A real Prometheus scrapes that server, which writes to a real InfluxDB.
`python -m pytest -s tests/telemetry/test_dashboards.py` prints the queries and their numbers of series.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.telemetry.model_labels import OTHER
from tests.clients.harness import (
    Client,
    StartedServer,
    model_processes,
)
from tests.clients.test_many import ONE_FITS
from tests.commands import NDIF
from tests.gateway.test_bad_input import OLD, key, send_old
from tests.processes import children
from tests.services.influxdb import InfluxServer
from tests.services.prometheus import PrometheusServer
from tests.services.redis import RedisServer
from tests.serving import serving
from tests.telemetry.operating import (
    INTERVAL_S,
    PROMETHEUS,
    Query,
    alert_queries,
    dashboard_queries,
    influxdb_queries,
    influxdb_variables,
)
from tests.tiny_models import make_gpt2, make_llama
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

BROKEN = "tests/broken"
GPT2, LLAMA = "tests/gpt2", "tests/llama"
DATABASE = "ndif"


@dataclass(frozen=True)
class Site:
    """A server with a broker, whose models alternate on one GPU, and the stores of its metrics."""

    server: StartedServer
    redis: RedisServer
    prometheus: PrometheusServer
    influx: InfluxServer

    def garbage(self, repo_id: str = GPT2, callback: str = "") -> httpx.Response:
        """Send a job that cannot run."""
        name = key(repo_id, path=OLD, task=None)
        return send_old(self.server, nnsight_model_key=name, ndif_callback=callback)

    def probes(self) -> float:
        """Return the number of successful probes."""
        lines = httpx.get(f"{self.server.url}/metrics").text.splitlines()
        counts = (line.split() for line in lines if line.startswith("ndif_probe_seconds_count{"))
        return sum(float(count) for _, count in counts)

    def until_scraped(self) -> None:
        """Wait until Prometheus has scraped the server's current values."""
        now = time.time()
        until(lambda: self.prometheus.query(f"timestamp(up) > {now}"))

    def has_written(self, measurement: str, job: str) -> bool:
        """Return True if InfluxDB has a measurement of a job."""
        return job in {row["request_id"] for row in self.influx.rows(DATABASE, measurement)}

    def model_processes(self) -> list[int]:
        """Return the processes that hold models, which the leader has started."""
        pids = map(model_processes, children(self.server.process.pid))
        return [*itertools.chain.from_iterable(pids)]

    def end_of(self, job: str) -> str:
        """Wait until a job has ended; return its status."""

        def ended() -> str | None:
            status: str = httpx.get(f"{self.server.url}/response/{job}").json()["status"]
            return status if status in ("COMPLETED", "ERROR") else None

        status: str = until(ended)
        return status


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models, and one with an unreadable tokenizer."""
    folder = tmp_path_factory.mktemp("shown")
    folders = {
        GPT2: make_gpt2(folder / "gpt2"),
        LLAMA: make_llama(folder / "llama"),
        BROKEN: make_gpt2(folder / "broken"),
    }
    (folders[BROKEN] / "tokenizer.json").write_text("{")
    return folders


@pytest.fixture(scope="module")
def site(
    models: dict[str, Path], runtimes: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A server that was in use and has had all kinds of failures."""
    folder = tmp_path_factory.mktemp("site")
    hub = HfMirror(share_weights=True)
    for name, files in models.items():
        hub.serve(MirroredModel(name, files, None, "text-generation"))
    with (
        serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as hub_url,
        RedisServer(tmp_path_factory.mktemp("redis")) as redis,
        InfluxServer(tmp_path_factory.mktemp("influxdb")) as influx,
    ):
        server = StartedServer(
            environment={
                "HF_ENDPOINT": f"{hub_url}/hub",
                "HF_HOME": str(folder / "hf"),
                "NDIF_RUNTIMES_DIR": str(runtimes),
                "NDIF_SESSION_ROOT": str(folder / "sessions"),
                "NDIF_BROKER_URL": redis.url,
                "NDIF_CLUSTER_SECRET": "a secret of this test",
                "NDIF_NODE_GPUS": ONE_FITS,
                "NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS": "0",
                "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
                "NDIF_CALLBACK_NETWORKS": "127.0.0.0/8",
                "NDIF_CALLBACK_ATTEMPTS": "1",
                "NDIF_INFLUXDB_URL": influx.create(DATABASE),
                "NDIF_PROBE_INTERVAL_S": "2",
                "NDIF_PROBE_TIMEOUT_S": "5m",
            }
        )
        clients = []
        try:
            server.ready()
            rules = [PROMETHEUS / "alerts.yml"]
            target = server.url.removeprefix("http://")
            with PrometheusServer(folder, target, rules=rules) as prometheus:
                running_site = Site(server, redis, prometheus, influx)
                for name in (GPT2, LLAMA):
                    environment = {
                        "NDIF_HOST": server.url,
                        "HF_ENDPOINT": f"{hub_url}/hub",
                        "HF_HOME": str(folder / f"client-{len(clients)}"),
                        "NDIF_API_KEY": "",
                    }
                    clients.append(Client("scenarios_many", name, models[name], environment))
                use(running_site, clients)
                yield running_site
        finally:
            for client in clients:
                client.close()
            server.stop()


def use(site: Site, clients: list[Client]) -> None:
    """Use a server so that all its metrics have values."""
    for _ in range(3):
        for client in clients:  # each evicts the other's model
            client.run("scenario_a_trace")
    # A queue, and a user's mistake.
    busy = clients[0]
    busy.run("scenario_fifty_jobs_are_sent")
    busy.run("scenario_all_that_was_sent_is_answered")
    busy.run("scenario_a_failure")
    # A failing job whose webhook fails, a refused job, and a model that fails to load.
    job = site.garbage(callback="http://127.0.0.1:9/").json()["id"]
    assert site.end_of(job) == "ERROR"
    assert httpx.post(f"{site.server.url}/request", content=b"?").status_code == 400
    assert site.end_of(site.garbage(BROKEN).json()["id"]) == "ERROR"
    # A run that is ended by a limit.
    busy.run("scenario_a_block_that_prints_too_much")
    # A short outage of the broker.
    site.redis.pause()
    try:
        assert site.garbage().status_code == 503
        until(lambda: site.prometheus.query('ndif_store_up{store="broker"} == 0'))
    finally:
        site.redis.resume()
    until(lambda: site.garbage().status_code == 200)
    # A process that ends by itself.
    killed = site.model_processes()
    assert killed
    for process in killed:
        os.kill(process, signal.SIGKILL)
    for client in clients:
        client.run("scenario_a_trace")
    # A dedicated model, which the server probes; two probes make a rate.
    promtool_run = subprocess.run(
        [NDIF, "deploy", GPT2, "--dedicated"],
        env={**os.environ, **site.server.environment},
        capture_output=True,
        text=True,
    )
    assert promtool_run.returncode == 0, promtool_run
    for _ in range(2):
        count = site.probes()
        until(partial(lambda count: site.probes() > count, count))
        site.until_scraped()


def answer(prometheus: PrometheusServer, query: Query) -> tuple[int, int]:
    """Return the number of series in a query's answer, and the number of series with a numeric value."""
    samples = prometheus.query(query.text)
    return len(samples), sum(not math.isnan(float(sample["value"][1])) for sample in samples)


def test_each_prometheus_query_has_an_answer(site: Site) -> None:
    queries = [*dashboard_queries(), *alert_queries()]

    def silent() -> list[str]:
        answers = {query: answer(site.prometheus, query) for query in queries}
        return [
            f"{series:3} {numbers:3}  {query.place:50} {query.text}"
            for query, (series, numbers) in answers.items()
            if not numbers
        ]

    # The latest values are not scraped yet, and a rate needs two scrapes.
    until(lambda: not silent(), lambda: "\n".join(silent()))


def test_prometheus_evaluates_every_rule(site: Site) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = site.prometheus.get("rules")["groups"]
        rule_list: list[dict[str, Any]] = group["rules"]
        return rule_list

    until(lambda: all(rule["health"] == "ok" for rule in rules()), lambda: str(rules()))
    assert len(rules()) == len(alert_queries())


def test_alert_summary_names_what_happened(site: Site) -> None:
    def summaries() -> dict[str, list[str]]:
        alerts = site.prometheus.get("alerts")["alerts"]
        assert "<no value>" not in json.dumps(alerts)
        summaries_by_alert = defaultdict(list)
        for alert in alerts:
            summaries_by_alert[alert["labels"]["alertname"]].append(alert["annotations"]["summary"])
        return summaries_by_alert

    summaries_by_alert = until(lambda: "NdifReplicasLost" in summaries() and summaries())
    assert "ended by itself" in summaries_by_alert["NdifReplicasLost"][0]
    # The killed process may have been loading its model, so other summaries are possible.
    assert any(summary.startswith(BROKEN) for summary in summaries_by_alert["NdifLoadsFail"])
    assert "NdifTargetDown" not in summaries_by_alert


# InfluxDB


@dataclass(frozen=True)
class Answer:
    """A series of InfluxDB's answer to a query."""

    tags: dict[str, str]
    values: list[float]


def influxdb_answers(influx: InfluxServer, query: Query) -> list[Answer]:
    """Return the series of a query's answer that have a value above 0."""
    rows = []
    for series in influx.query(DATABASE, query.text):
        assert len(series["columns"]) == 2, query
        values = [value for _, value in series["values"] if value is not None]
        if any(value > 0 for value in values):
            rows.append(Answer(series.get("tags", {}), values))
    return rows


@pytest.fixture(scope="module")
def written(site: Site) -> tuple[int, int]:
    """The time range of a server's measurements in Unix milliseconds; all of them are already written."""
    until(lambda: len(site.influx.rows(DATABASE, "GPUMemMetric")) > 50)
    now_ms = int(time.time() * 1000)  # excludes later probes and the next job
    job = site.garbage().json()["id"]
    # Each process sends its points in order: the gateway the first measurement, the leader the others.
    for name in ("NetworkStatusMetric", "RequestStatusTimeMetric"):
        until(partial(site.has_written, name, job))
    return now_ms - 3_600_000, now_ms


def test_each_influxdb_query_has_an_answer(site: Site, written: tuple[int, int]) -> None:
    answers = {query: influxdb_answers(site.influx, query) for query in influxdb_queries(*written)}
    for query, series in answers.items():
        print(f"{len(series):3}  {query.place:60} {query.text}")
    assert not [query.place for query, series in answers.items() if not series]
    for query, series in answers.items():
        for tag in re.findall(r"\$tag_(\w+)", query.legend):
            assert all(answer.tags[tag] for answer in series), query
        assert "$tag_" in query.legend or len(series) == 1, query


def test_influxdb_rates_add_up_to_counts(site: Site, written: tuple[int, int]) -> None:
    (query,) = (
        q for q in influxdb_queries(*written) if q.place.endswith(": Jobs accepted, by model")
    )
    answers = influxdb_answers(site.influx, query)
    within = "time >= {}ms AND time <= {}ms".format(*written)
    counted = f'SELECT count("bytes") FROM "NetworkStatusMetric" WHERE {within} GROUP BY "model"'
    numbers = {
        series["tags"]["model"]: series["values"][0][1]
        for series in site.influx.query(DATABASE, counted)
    }
    for answer in answers:
        assert sum(answer.values) * INTERVAL_S == pytest.approx(numbers[answer.tags["model"]])
    assert len(answers) == 3


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r"tests\/gpt2", {GPT2}),
        (r"(tests\/gpt2|tests\/llama)", {GPT2, LLAMA}),
        (r"gpt2", set()),
    ],
)
def test_model_variable_selects_matching_models(
    site: Site, written: tuple[int, int], pattern: str, names: set[str]
) -> None:
    """Grafana's format `regex` puts a backslash before each slash."""
    names_found = {
        answer.tags["model"]
        for query in influxdb_queries(*written, pattern)
        for answer in influxdb_answers(site.influx, query)
        if query.legend == "$tag_model"
    }
    assert names_found == names


def test_model_variable_lists_models_of_jobs(site: Site, written: tuple[int, int]) -> None:
    for variable in influxdb_variables():
        influx_series = site.influx.query(DATABASE, variable.text)
        values = {value for series in influx_series for _, value in series["values"]}
        # When the job for the broken model was sent, no replica of it had begun to load.
        assert values == {GPT2, LLAMA, OTHER}, variable
