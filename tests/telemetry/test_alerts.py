"""The rules for Prometheus: each alert fires on its cause, resolves, and gives advice."""

from __future__ import annotations

import re

import pytest
import yaml
from click import Context

from ndif.cli.main import cli
from tests.services.prometheus import promtool
from tests.telemetry.operating import DOCUMENT, PROMETHEUS, ROOT, RULES

NAMES = {rule["alert"] for rule in RULES}


@pytest.mark.engine
def test_prometheus_accepts_configuration() -> None:
    assert promtool("check", "config", str(PROMETHEUS / "prometheus.yml")) == ""


@pytest.mark.engine
def test_each_alert_fires_on_its_cause_and_resolves() -> None:
    assert promtool("test", "rules", str(PROMETHEUS / "alerts_test.yml")) == ""


def test_every_alert_has_a_rule_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    fired: set[str] = set()
    for case in tests:
        expected = [
            {re.findall(r'alertname="(\w+)"', sample["labels"])[0] for sample in at["exp_samples"]}
            for at in case["promql_expr_test"]
        ]
        # Nothing fires before the cause and after it.
        assert expected[0] == expected[-1] == set(), case["name"]
        fired.update(*expected)
    assert fired == NAMES


def test_document_lists_every_alert() -> None:
    rows = re.findall(r"^\| `(Ndif\w+)` \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert dict(rows) == {rule["alert"]: rule["labels"]["severity"] for rule in RULES}
    assert len(rows) == len(RULES)


def test_alerts_name_existing_commands_and_settings() -> None:
    text = " ".join(rule["annotations"]["description"] for rule in RULES)
    commands = set(re.findall(r"`ndif (\w+)", text))
    assert len(commands) > 8
    assert commands <= set(cli.list_commands(Context(cli)))
    settings = set(re.findall(r"NDIF_\w+", text))
    assert len(settings) > 5
    assert settings <= set(re.findall(r"NDIF_\w+", (ROOT / ".env.example").read_text()))


def test_alert_description_has_severity_and_advice(subtests: pytest.Subtests) -> None:
    for rule in RULES:
        with subtests.test(str(rule["alert"])):
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert re.fullmatch(r"\d+m", rule["for"])
            summary, description = (
                rule["annotations"][name] for name in ("summary", "description")
            )
            assert summary.endswith(".")
            assert description.endswith(".")
            assert len(description.split()) >= 20
