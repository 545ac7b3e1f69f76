"""Every scenario of every generation on a trusting server; scenarios of the table on a sandboxed server.

A scenario runs a block remotely and in its own process, and compares the results bit by bit.
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
from tests.clients.table import EVERY, PER_USER, REFUSED, SANDBOXED, SHARED_PASSES, STACK, chosen
from tests.conftest import CACHE, NAME, Clients, client_environment

pytestmark = [pytest.mark.process, pytest.mark.slow]

MODULES = [
    (generation, name)
    for generation in ("0.8", "0.7", "0.6")
    for name in scenarios("scenarios_modules")
]
"""Scenarios shared by all generations, with objects that are rejected only for untrusted clients."""

HELPED = [
    ("0.7", "scenario_a_dataclass_of_the_script"),
    ("0.7", "scenario_classes_of_typing_are_sent"),
    ("0.8", "scenario_what_a_block_makes_comes_back"),
    ("0.7", "scenario_what_a_block_makes_comes_back"),
]
"""Scenarios of these modules that need the server's help even with trusted clients."""


@pytest.mark.parametrize(("generation", "scenario"), [*EVERY, *HELPED])
def test_trusted_scenario_matches_local_result(
    clients: Clients, generation: str, scenario: str
) -> None:
    clients[generation].run(scenario)


@pytest.mark.parametrize("generation", ["0.8", "0.7", "0.6"])
def test_weights_written_by_trusted_block_stay_private(clients: Clients, generation: str) -> None:
    """The Protector gives other jobs a copy of each weight (docs/security.md)."""
    clients[generation].run("weights_that_a_block_writes_are_its_own")


# Clients of the header wire differ only on the wire, which the trusting server covers.
CONFINED = [*chosen(SANDBOXED, "0.8", "0.7"), *chosen(PER_USER, "0.6"), *MODULES]


@pytest.mark.parametrize(("generation", "scenario"), CONFINED)
def test_sandboxed_scenario_matches_local_result_or_is_rejected(
    untrusted: Clients, generation: str, scenario: str
) -> None:
    refusal = REFUSED.get(scenario)
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
    """A client of nnsight 0.7 with nnterp, which the server lacks."""
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
def test_nnterp_scenario_runs_sandboxed(nnterp: Client, scenario: str) -> None:
    nnterp.run(scenario)


def test_scenario_table_names_only_existing_scenarios() -> None:
    names = {name for _, name in EVERY}
    for reasons in (SANDBOXED, PER_USER, STACK, SHARED_PASSES):
        named = {f"scenario_{name}" for names in reasons.values() for name in names}
        assert named <= names
