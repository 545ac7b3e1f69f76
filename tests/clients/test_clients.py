"""Every scenario of every generation, against one server that serves them all."""

from __future__ import annotations

import pytest

from tests.clients.harness import Client, scenarios


def headers_scenarios(generation: str) -> list[str]:
    """Those of both generations of the headers wire, and those of this one alone."""
    other = {"06": "scenario_07_", "07": "scenario_06_"}[generation]
    return [name for name in scenarios("scenarios_headers") if not name.startswith(other)]


@pytest.mark.parametrize("scenario", scenarios("scenarios_08"))
def test_nnsight_08(client_08: Client, scenario: str) -> None:
    client_08.run(scenario)


@pytest.mark.parametrize("scenario", headers_scenarios("07"))
def test_nnsight_07(client_07: Client, scenario: str) -> None:
    client_07.run(scenario)


@pytest.mark.parametrize("scenario", headers_scenarios("06"))
def test_nnsight_06(client_06: Client, scenario: str) -> None:
    client_06.run(scenario)
