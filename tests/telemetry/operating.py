"""The files for Prometheus and Grafana, parsed for tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
DOCUMENT = ROOT / "docs" / "monitoring.md"

RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARDS: dict[str, dict[str, Any]] = {
    file.name: json.loads(file.read_text())
    for file in sorted((GRAFANA / "dashboards").glob("*.json"))
}

_VARIABLES = {"$__rate_interval": "5m", "$instance": ".*", "$model": ".*"}
INTERVAL_S = 10
"""The interval of queries to InfluxDB."""


@dataclass(frozen=True)
class Query:
    """A query of a panel, a variable or an alert."""

    place: str
    text: str
    legend: str = ""


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a dashboard's panels, without row headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def source_of(dashboard: dict[str, Any]) -> str:
    """Return the type of a dashboard's data source: `prometheus` or `influxdb`."""
    source: str = dashboard["templating"]["list"][0]["query"]
    return source


def query_text(target: dict[str, Any]) -> str:
    """Return the text of a panel's query."""
    text: str = target["expr"] if "expr" in target else target["query"]
    return text


def of_source(source: str) -> dict[str, dict[str, Any]]:
    """Return the dashboards of a type of data source."""
    return {
        name: dashboard for name, dashboard in DASHBOARDS.items() if source_of(dashboard) == source
    }


def dashboard_queries() -> list[Query]:
    """Return the Prometheus queries of all panels and variables, with variables set to "All"."""
    queries = []
    for name, dashboard in of_source("prometheus").items():
        for panel in panels(dashboard):
            for target in panel.get("targets", ()):
                text = target["expr"]
                for variable, value in _VARIABLES.items():
                    text = text.replace(variable, value)
                queries.append(Query(f"{name}: {panel['title']}", text))
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                series = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                assert series is not None
                text = f"count by ({series[2]}) ({series[1]})"
                queries.append(Query(f"{name}: ${variable['name']}", text))
    return queries


def influxdb_queries(since_ms: int, until_ms: int, model: str = ".*") -> list[Query]:
    """Return the InfluxDB queries of all panels, for a time range and matching models."""
    macros = {
        "$timeFilter": f"time >= {since_ms}ms and time <= {until_ms}ms",
        "$__interval_ms": str(INTERVAL_S * 1000),
        "$__interval": f"{INTERVAL_S}s",
        "${model:regex}": model,
    }
    queries = []
    for name, dashboard in of_source("influxdb").items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                text = query_text(target)
                for macro, value in macros.items():
                    text = text.replace(macro, value)
                queries.append(Query(f"{name}: {panel['title']}", text, target["alias"]))
    return queries


def influxdb_variables() -> list[Query]:
    """Return the InfluxDB queries of all variables."""
    return [
        Query(f"{name}: ${variable['name']}", variable["query"]["query"])
        for name, dashboard in of_source("influxdb").items()
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]


def alert_queries() -> list[Query]:
    """Return the queries of all alerts, changed so that they have an answer without a problem.

    Comparisons return 0 or 1 (`bool`). `absent` is dropped, and `and` replaces `unless`, so that these
    series must exist with matching labels. A few seconds replace an hour.
    """
    queries = []
    for rule in RULES:
        text = re.sub(r"\s+", " ", rule["expr"])
        text = re.sub(r"absent\((.*)\)", r"\1", text)
        text = re.sub(r" offset \w+", " offset 3s", text)
        text = re.sub(r"\bunless\b", "and", text)
        text = re.sub(r" (==|[<>]=?) ", r" \1 bool ", text)
        queries.append(Query(rule["alert"], text))
    return queries
