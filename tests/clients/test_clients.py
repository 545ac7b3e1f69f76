"""Every scenario of every generation, against one server that trusts its clients and one that does not.

A scenario compares what came back with what the same block gives in its own process, bit by bit; what
holds for both servers is therefore equal between them.
"""

from __future__ import annotations

import pytest

from tests.clients.harness import scenarios
from tests.conftest import Clients


def headers_scenarios(generation: str) -> list[str]:
    """Scenarios of both generations of the header wire, and of this one alone."""
    other = {"0.6": "scenario_07_", "0.7": "scenario_06_"}[generation]
    return [name for name in scenarios("scenarios_headers") if not name.startswith(other)]


EVERY = [
    *(("0.8", name) for name in scenarios("scenarios_08")),
    *(("0.7", name) for name in headers_scenarios("0.7")),
    *(("0.6", name) for name in headers_scenarios("0.6")),
]

MODULES = [
    (generation, name)
    for generation in ("0.8", "0.7", "0.6")
    for name in scenarios("scenarios_modules")
]
"""Scenarios that every generation writes alike, of objects that only an untrusted client can be refused."""

DATACLASS = ("0.7", "scenario_a_dataclass_of_the_script")
"""The one of these that needs the server's help even where it trusts its clients."""


OF_THE_TRUSTED = {
    "scenario_an_adapter_is_applied_to_its_request_alone": "takes adapters from the Hub alone",
    "scenario_an_adapter_that_does_not_exist": "there is no public repository of that name",
    "scenario_a_segfault_costs_one_request": "module 'ctypes' is not available on this server",
    "scenario_a_process_that_ends_itself_costs_one_request": (
        "module 'os' is not available on this server"
    ),
    "scenario_what_cannot_be_sent_is_said": "module 'threading' is not available on this server",
    "scenario_what_the_user_sees": "module 'sys' is not available on this server",
}
"""Scenarios that an untrusted user is refused, in words."""


@pytest.mark.parametrize(("generation", "scenario"), [*EVERY, DATACLASS])
def test_trusted(clients: Clients, generation: str, scenario: str) -> None:
    clients[generation].run(scenario)


@pytest.mark.parametrize("generation", ["0.8", "0.7", "0.6"])
def test_weights_that_a_trusted_block_writes(clients: Clients, generation: str) -> None:
    """The Protector gives others a copy of each weight (docs/security.md)."""
    clients[generation].run("weights_that_a_block_writes_are_its_own")


@pytest.mark.parametrize(("generation", "scenario"), [*EVERY, *MODULES])
def test_sandboxed(untrusted: Clients, generation: str, scenario: str) -> None:
    refusal = OF_THE_TRUSTED.get(scenario)
    if refusal is None:
        untrusted[generation].run(scenario)
    else:
        with pytest.raises(AssertionError, match=refusal):
            untrusted[generation].run(scenario)
