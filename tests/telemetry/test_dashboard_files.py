"""The form of the dashboards for Grafana, and Grafana's provisioning files."""

from __future__ import annotations

import itertools
import re

import pytest
import yaml
from deploy.grafana.make import files

from tests.telemetry.operating import (
    DASHBOARDS,
    DOCUMENT,
    GRAFANA,
    PROMETHEUS,
    alert_queries,
    dashboard_queries,
    of_source,
    panels,
    query_text,
    source_of,
)


def test_dashboard_files_equal_generated_ones() -> None:
    written = {file.name: file.read_text() for file in (GRAFANA / "dashboards").iterdir()}
    texts = {name: files.text_of(board) for name, board in files.DASHBOARDS.items()}
    assert written == texts, "run `python -m deploy.grafana.make`"


def test_dashboards_have_unique_names() -> None:
    for field in ("uid", "title"):
        assert len({dashboard[field] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


def test_panels_have_unique_ids_and_do_not_overlap(subtests: pytest.Subtests) -> None:
    for name, dashboard in DASHBOARDS.items():
        with subtests.test(name):
            panel_list = dashboard["panels"]
            assert len({panel["id"] for panel in panel_list}) == len(panel_list)
            taken: set[tuple[int, int]] = set()
            for panel in panel_list:
                x, y, w, h = (panel["gridPos"][side] for side in "xywh")
                assert x >= 0
                assert x + w <= 24
                place = set(itertools.product(range(x, x + w), range(y, y + h)))
                assert len(place) == w * h > 0
                assert not taken & place, panel["title"]
                taken |= place


def test_panels_have_titles_descriptions_and_queries(subtests: pytest.Subtests) -> None:
    for name, dashboard in DASHBOARDS.items():
        with subtests.test(name):
            assert dashboard["schemaVersion"] >= 39
            titles = [panel["title"] for panel in panels(dashboard)]
            assert len(set(titles)) == len(titles) > 5
            for panel in panels(dashboard):
                assert panel["title"]
                assert panel["description"].endswith("."), panel["title"]
                source = {"type": source_of(dashboard), "uid": "${datasource}"}
                assert panel["datasource"] == source
                if panel["type"] == "alertlist":  # which queries alerts instead of values
                    continue
                assert panel["fieldConfig"]["defaults"]["unit"]
                targets = panel["targets"]
                assert len({target["refId"] for target in targets}) == len(targets) > 0
                for target in targets:
                    assert query_text(target).strip()
                    assert target["datasource"] == source


def test_dashboard_variables_are_defined_and_used(subtests: pytest.Subtests) -> None:
    for name, dashboard in DASHBOARDS.items():
        with subtests.test(name):
            variables = [variable["name"] for variable in dashboard["templating"]["list"]]
            texts = [
                query_text(target)
                for panel in panels(dashboard)
                for target in panel.get("targets", ())
            ]
            used = set(re.findall(r"\$\{?(\w+)", " ".join(texts)))
            if source_of(dashboard) == "prometheus":
                assert variables == ["datasource", "instance", "model"]
                assert used <= {*variables, "__rate_interval"}
                assert "instance" in used
            else:
                assert variables == ["datasource", "model"]
                assert used == {"model", "timeFilter", "__interval", "__interval_ms"}


def test_dashboards_link_to_dashboards_of_same_source(subtests: pytest.Subtests) -> None:
    for name in DASHBOARDS:
        with subtests.test(name):
            source = source_of(DASHBOARDS[name])
            (link,) = DASHBOARDS[name]["links"]
            linked = {other for other, board in DASHBOARDS.items() if board["tags"] == link["tags"]}
            assert linked == of_source(source).keys()


def test_influxdb_queries_use_documented_measurements(subtests: pytest.Subtests) -> None:
    for name in of_source("influxdb"):
        with subtests.test(name):
            documented = measurements()
            for panel in panels(DASHBOARDS[name]):
                for target in panel["targets"]:
                    assert target["rawQuery"] is True
                    assert target["resultFormat"] == "time_series"
                    text = target["query"]
                    (measurement,) = re.findall(r'FROM "(\w+)" WHERE \$timeFilter AND ', text)
                    names = {*re.findall(r'"(\w+)"', text)} - {measurement}
                    assert names <= documented[measurement]
                    assert {*re.findall(r"\$tag_(\w+)", target["alias"])} <= names


def test_every_measurement_is_in_a_dashboard() -> None:
    shown = {
        measurement
        for dashboard in of_source("influxdb").values()
        for panel in panels(dashboard)
        for target in panel["targets"]
        for measurement in re.findall(r'FROM "(\w+)"', target["query"])
    }
    assert shown == measurements().keys()
    assert len(shown) == 7


def measurements() -> dict[str, set[str]]:
    """Return the documented tags and fields of each measurement."""
    table = DOCUMENT.read_text().partition("## InfluxDB")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+Metric)` \| (.*?) \| (.*?) \|", table, re.MULTILINE)
    return {name: {*re.findall(r"\w+", f"{tags} {fields}")} for name, tags, fields in rows}


def test_every_queried_metric_is_documented() -> None:
    documented = set(re.findall(r"`(ndif_\w+)`", DOCUMENT.read_text()))
    queries = " ".join(query.text for query in (*dashboard_queries(), *alert_queries()))
    asked = set(re.findall(r"\bndif_\w+", queries))
    assert len(asked) > 25
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} <= documented


def test_every_documented_metric_is_in_a_dashboard() -> None:
    table = DOCUMENT.read_text().partition("## Metrics")[2].partition("\n## ")[0]
    named = re.findall(r"^\| (`ndif_.*?) \|", table, re.MULTILINE)
    documented = {name for row in named for name in re.findall(r"ndif_\w+", row)}
    queries = " ".join(query.text for query in dashboard_queries())
    assert len(documented) > 25
    assert not {name for name in documented if name not in queries}


def test_grafana_and_prometheus_have_same_interval() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/ndif.yml").read_text())
    (data_source,) = source["datasources"]
    scraping = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert data_source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    assert (data_source["type"], data_source["access"]) == ("prometheus", "proxy")


def test_grafana_queries_influxdb_with_influxql() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/ndif-influxdb.yml").read_text())
    (data_source,) = source["datasources"]
    assert (data_source["type"], data_source["access"]) == ("influxdb", "proxy")
    assert data_source["jsonData"]["version"] == "InfluxQL"
    assert data_source["jsonData"]["dbName"]


def test_grafana_reads_dashboards_from_files() -> None:
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/ndif.yml").read_text())
    assert [provider["type"] for provider in providers["providers"]] == ["file"]
