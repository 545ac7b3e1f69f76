"""Benign untrusted users: permitted operations, and the messages for forbidden ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import Client, LocalServer, scenarios
from tests.conftest import NAME, client_environment

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def untrusted_client(
    sandboxed: LocalServer, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client of nnsight 0.8."""
    home = tmp_path_factory.mktemp("client-untrusted")
    started = Client(
        "scenarios_untrusted", NAME, tiny_gpt2, client_environment(sandboxed, home, None)
    )
    yield started
    started.close()


@pytest.mark.parametrize("scenario", scenarios("scenarios_untrusted"))
def test_untrusted_scenario_behaves_as_documented(untrusted_client: Client, scenario: str) -> None:
    untrusted_client.run(scenario)
