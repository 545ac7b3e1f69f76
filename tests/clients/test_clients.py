"""Every scenario of every generation, against one server that trusts its clients and one that does not.

A scenario compares what came back with what the same block gives in its own process, bit by bit; what
holds for both servers is therefore equal between them.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import Client, LocalServer, scenarios
from tests.conftest import CACHE, NAME, Clients, client_environment


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


NNTERP = "nnterp==1.3.0"


@pytest.fixture(scope="module")
def nnterp(
    sandboxed: LocalServer,
    tiny_gpt2: Path,
    runtimes: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    """A client of nnsight 0.7 that has nnterp; the server has none."""
    folder = CACHE / NNTERP
    with (CACHE / "nnterp.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "nnterp").is_dir():
            options = ("--quiet", "--no-deps", "--disable-pip-version-check", f"--target={folder}")
            command = [sys.executable, "-m", "pip", "install", *options, NNTERP]
            subprocess.run(command, check=True)
    environment = client_environment(
        sandboxed, tmp_path_factory.mktemp("client-nnterp"), runtimes / "0.7"
    )
    environment["PYTHONPATH"] += f"{os.pathsep}{folder}"
    started = Client("scenarios_nnterp", NAME, tiny_gpt2, environment)
    yield started
    started.close()


@pytest.mark.parametrize("scenario", scenarios("scenarios_nnterp"))
def test_nnterp_sandboxed(nnterp: Client, scenario: str) -> None:
    nnterp.run(scenario)
