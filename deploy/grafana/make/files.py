"""The files of dashboards, by their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.grafana.make.dashboard import dashboard
from deploy.grafana.make.influxdb import jobs as influxdb_jobs
from deploy.grafana.make.influxdb import models as influxdb_models
from deploy.grafana.make.influxdb.queries import INFLUXDB
from deploy.grafana.make.prometheus import jobs, models, overview, server
from deploy.grafana.make.prometheus.queries import PROMETHEUS

FOLDER = Path(__file__).parents[1] / "dashboards"

DASHBOARDS: Mapping[str, Mapping[str, Any]] = {
    "overview.json": dashboard(
        PROMETHEUS,
        "ndif-overview",
        "NDIF: overview",
        "Is the server well, and what does it do?",
        overview.ROWS,
    ),
    "jobs.json": dashboard(
        PROMETHEUS,
        "ndif-jobs",
        "NDIF: jobs",
        "Throughput, latency, queues, errors and sizes of jobs.",
        jobs.ROWS,
    ),
    "models.json": dashboard(
        PROMETHEUS,
        "ndif-models",
        "NDIF: models",
        "Replicas, loads, evictions, and memory of GPUs.",
        models.ROWS,
    ),
    "server.json": dashboard(
        PROMETHEUS,
        "ndif-server",
        "NDIF: server",
        "HTTP, live channels, webhooks and mails, stores, hosts.",
        server.ROWS,
    ),
    "influxdb-jobs.json": dashboard(
        INFLUXDB,
        "ndif-influxdb-jobs",
        "NDIF, InfluxDB: jobs",
        "Throughput, latency, queues, errors and sizes of jobs.",
        influxdb_jobs.ROWS,
    ),
    "influxdb-models.json": dashboard(
        INFLUXDB,
        "ndif-influxdb-models",
        "NDIF, InfluxDB: models",
        "Peak memory, loads, and use of models.",
        influxdb_models.ROWS,
    ),
}


def text_of(found: Mapping[str, Any]) -> str:
    """Return the text of a dashboard's file."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
