"""The generated references: complete, and consistent with the written documents."""

from __future__ import annotations

import re

import click
import pytest
from docs.make import commands, metrics, routes, variables
from prometheus_client import generate_latest

from ndif.config.reference import name_of as variable_of
from ndif.config.settings import Settings
from tests.cli.test_every_command import EVERY
from tests.docs.documents import ROOT

MONITORING = (ROOT / "docs" / "monitoring.md").read_text()


def test_reference_lists_every_variable_with_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", variables.page(), re.MULTILINE)
    assert [name for name, _ in rows] == [variable_of(field) for field in Settings.model_fields]
    assert dict(rows)["NDIF_MAX_REQUEST_BYTES"] == "`1GiB`"


def test_reference_lists_every_command_with_options() -> None:
    page = commands.page()
    for name, command in EVERY.items():
        (section,) = re.findall(
            rf"^#+ ndif {re.escape(name)}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL
        )
        shown = [
            option
            for param in command.params
            if isinstance(param, click.Option) and not param.hidden
            for option in param.opts
            if option.startswith("--")
        ]
        assert not [option for option in shown if option not in section], name


@pytest.fixture(scope="module")
def http() -> str:
    return routes.page()


def test_reference_lists_every_route_with_parameters_and_answers(http: str) -> None:
    described = routes.document()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            (section,) = re.findall(
                rf"^### {method.upper()} {re.escape(path)}\n(.*?)(?=^##|\Z)",
                http,
                re.MULTILINE | re.DOTALL,
            )
            for parameter in operation.get("parameters", []):
                assert f"| `{parameter['name']}` | {parameter['in']} |" in section
            for status in operation["responses"]:
                assert status in ("4XX", "5XX") or f"| {status} " in section
    for tag in described["tags"]:
        assert f"\n## {tag['name']}\n" in http
    for name in described["components"]["schemas"]:
        assert f"\n### {name}\n" in http


def test_reference_and_monitoring_page_list_every_metric() -> None:
    described = {metric.name: set(metric.labels) for metric in metrics.described()}
    counted = re.findall(r"^# TYPE (ndif_\w+) ", generate_latest().decode(), re.MULTILINE)
    assert set(counted) <= described.keys()
    table = MONITORING.partition("## Metrics\n")[2].partition("\n\nThe names that other")[0]
    written = {
        name: set(re.findall(r"`(\w+)`", labels))
        for names, labels in re.findall(r"^\| (`ndif_.*?) \| (.*?) ?\|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert written == described
    page = metrics.page()
    assert all(f"| `{name}` |" in page for name in described)
