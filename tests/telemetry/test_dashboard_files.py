"""The form of the dashboards for Grafana, and of what Grafana is told of them."""

from __future__ import annotations

import itertools
import re

import pytest
import yaml
from deploy.grafana import make

from tests.telemetry.operating import (
    DASHBOARDS,
    DOCUMENT,
    GRAFANA,
    PROMETHEUS,
    alert_queries,
    dashboard_queries,
    panels,
)

every_dashboard = pytest.mark.parametrize("name", DASHBOARDS)


def test_the_files_are_those_that_their_source_makes() -> None:
    written = {file.name: file.read_text() for file in (GRAFANA / "dashboards").iterdir()}
    made = {name: make.text_of(found) for name, found in make.DASHBOARDS.items()}
    assert written == made, "run `python deploy/grafana/make.py`"


def test_dashboards_have_names_of_their_own() -> None:
    for field in ("uid", "title"):
        assert len({dashboard[field] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


@every_dashboard
def test_panels_have_ids_and_places_of_their_own(name: str) -> None:
    found = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        assert x >= 0
        assert x + w <= 24
        place = set(itertools.product(range(x, x + w), range(y, y + h)))
        assert len(place) == w * h > 0
        assert not taken & place, panel["title"]
        taken |= place


@every_dashboard
def test_panels_say_what_they_show(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert dashboard["schemaVersion"] >= 39
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(set(titles)) == len(titles) > 5
    for panel in panels(dashboard):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        if panel["type"] == "alertlist":  # which asks for alerts, and not for values
            continue
        assert panel["fieldConfig"]["defaults"]["unit"]
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets) > 0
        for target in targets:
            assert target["expr"].strip()
            assert target["datasource"]["uid"] == "${datasource}"


@every_dashboard
def test_variables_are_there_and_used(name: str) -> None:
    variables = {each["name"]: each for each in DASHBOARDS[name]["templating"]["list"]}
    assert [*variables] == ["datasource", "instance", "model"]
    expressions = [t["expr"] for p in panels(DASHBOARDS[name]) for t in p.get("targets", ())]
    used = set(re.findall(r"\$(\w+)", " ".join(expressions)))
    assert used <= {*variables, "__rate_interval"}
    assert "instance" in used


def test_each_metric_that_is_asked_for_is_in_the_document() -> None:
    known = set(re.findall(r"`(ndif_\w+)`", DOCUMENT.read_text()))
    queries = " ".join(query.text for query in (*dashboard_queries(), *alert_queries()))
    asked = set(re.findall(r"\bndif_\w+", queries))
    assert len(asked) > 25
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} <= known


def test_every_metric_of_the_document_is_shown() -> None:
    table = DOCUMENT.read_text().partition("## Metrics")[2].partition("\n## ")[0]
    named = re.findall(r"^\| (`ndif_.*?) \|", table, re.MULTILINE)
    documented = {name for row in named for name in re.findall(r"ndif_\w+", row)}
    queries = " ".join(query.text for query in dashboard_queries())
    assert len(documented) > 25
    assert not {name for name in documented if name not in queries}


def test_grafana_is_told_of_the_same_interval_as_prometheus() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/ndif.yml").read_text())
    (found,) = source["datasources"]
    scraping = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert found["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    assert (found["type"], found["access"]) == ("prometheus", "proxy")
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/ndif.yml").read_text())
    assert [provider["type"] for provider in providers["providers"]] == ["file"]
