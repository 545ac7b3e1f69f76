"""Every scenario of every generation, against one server that trusts its clients and one that does not.

A scenario compares what came back with what the same block gives in its own process, bit by bit; what
holds for both servers is therefore equal between them.
"""

from __future__ import annotations

import pytest

from tests.clients.harness import Client, scenarios
from tests.conftest import Clients


def headers_scenarios(generation: str) -> list[str]:
    """Those of both generations of the headers wire, and those of this one alone."""
    other = {"0.6": "scenario_07_", "0.7": "scenario_06_"}[generation]
    return [name for name in scenarios("scenarios_headers") if not name.startswith(other)]


EVERY = [
    *(("0.8", name) for name in scenarios("scenarios_08")),
    *(("0.7", name) for name in headers_scenarios("0.7")),
    *(("0.6", name) for name in headers_scenarios("0.6")),
]


@pytest.mark.parametrize(("generation", "scenario"), EVERY)
def test_trusted(clients: Clients, generation: str, scenario: str) -> None:
    clients[generation].run(scenario)


@pytest.mark.parametrize(("generation", "scenario"), EVERY)
def test_sandboxed(strangers: Clients, generation: str, scenario: str) -> None:
    strangers[generation].run(scenario)
