"""Every scenario of every generation, against one server that serves them all."""

from __future__ import annotations

import pytest

from tests.clients.harness import Client, scenarios


@pytest.mark.parametrize("scenario", scenarios("scenarios_08"))
def test_nnsight_08(client_08: Client, scenario: str) -> None:
    client_08.run(scenario)
