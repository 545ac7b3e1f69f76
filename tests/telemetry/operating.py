"""The files that operators give to Prometheus and Grafana, as tests read them."""

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


@dataclass(frozen=True)
class Query:
    """A query of a panel, a variable or an alert."""

    place: str
    text: str


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a dashboard's panels, the headings of its rows left out."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[Query]:
    """Return what every panel and every variable asks, with variables of "All"."""
    found = []
    for name, dashboard in DASHBOARDS.items():
        for panel in panels(dashboard):
            for target in panel.get("targets", ()):
                text = target["expr"]
                for variable, value in _VARIABLES.items():
                    text = text.replace(variable, value)
                found.append(Query(f"{name}: {panel['title']}", text))
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                series = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                assert series is not None
                text = f"count by ({series[2]}) ({series[1]})"
                found.append(Query(f"{name}: ${variable['name']}", text))
    return found


def alert_queries() -> list[Query]:
    """Return what every alert asks, so that it has an answer while all is well.

    A comparison answers with 0 or 1 (`bool`) in place of nothing or something; what must not be there has
    to be there, and to have the labels of the rest (`and` for `unless`); a few seconds stand for an hour.
    """
    found = []
    for rule in RULES:
        text = re.sub(r"\s+", " ", rule["expr"])
        text = re.sub(r"absent\((.*)\)", r"\1", text)
        text = re.sub(r" offset \w+", " offset 3s", text)
        text = re.sub(r"\bunless\b", "and", text)
        text = re.sub(r" (==|[<>]=?) ", r" \1 bool ", text)
        found.append(Query(rule["alert"], text))
    return found
