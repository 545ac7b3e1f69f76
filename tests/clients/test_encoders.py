"""Models other than text generators are served to trusted and untrusted users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.harness import Client, LocalServer
from tests.conftest import client_environment
from tests.tiny_models import make_bert, make_t5

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize("options", [[], ["--sandbox"]], ids=["trusted", "sandboxed"])
@pytest.mark.parametrize(
    ("make", "task", "scenario"),
    [
        (make_bert, "fill-mask", "scenario_fills_a_mask"),
        # The server cannot rehearse this model and loads it anyway.
        (make_t5, "feature-extraction", "scenario_has_no_text_to_go_on_with"),
    ],
    ids=["bert", "t5"],
)
def test_encoder_is_served(
    make: Callable[[Path], Path],
    task: str,
    scenario: str,
    options: list[str],
    server_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    name = "tests/encoder"
    folder = make(tmp_path / "model")
    server = LocalServer(
        str(folder), "--name", name, "--task", task, *options, environment=server_environment
    )
    try:
        environment = client_environment(server.ready(), tmp_path / "home", None)
        client = Client("scenarios_encoders", name, folder, environment)
        try:
            client.run(scenario)
        finally:
            client.close()
    finally:
        server.stop()
