"""The files of models that a server of one process has accepted and not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from starlette.testclient import TestClient

from ndif.config.settings import Settings
from ndif.schema.deployment import DeploymentConfig
from ndif.server.embedded import Server
from tests.conftest import NAME


@pytest.fixture(scope="module")
def cache(hub_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub that holds the tiny model."""
    folder = tmp_path_factory.mktemp("hub-cache")
    snapshot_download(NAME, endpoint=hub_url, cache_dir=folder)
    return folder


@pytest.fixture
def client(
    tiny_gpt2: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TestClient:
    """A client of a server whose models have not begun to load."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    models = [
        DeploymentConfig("my-lab/folder", str(tiny_gpt2)),
        DeploymentConfig(NAME, NAME),
        DeploymentConfig("my-lab/elsewhere", "my-lab/elsewhere"),
    ]
    server = Server(Settings(), models, tmp_path, host="127.0.0.1", places=True)
    return TestClient(server.app, "http://127.0.0.1")  # without its lifespan, nothing is loaded


@pytest.mark.parametrize("name", ["my-lab/folder", NAME, NAME.upper()])
def test_a_models_files_are_served_before_it_is_loaded(name: str, client: TestClient) -> None:
    told = client.get(f"/hub/api/models/{name}").json()
    assert (told["id"].lower(), told["pipeline_tag"]) == (name.lower(), "text-generation")
    assert client.get(f"/hub/{name}/resolve/main/config.json").json()["model_type"] == "gpt2"
    assert client.get(f"/hub/{name}/resolve/main/model.safetensors").status_code == 404


def test_files_that_are_still_to_come_are_said_to_be(client: TestClient, cache: Path) -> None:
    answer = client.get("/hub/api/models/my-lab/elsewhere")
    assert answer.status_code == 404
    assert "'my-lab/elsewhere' are not on this server yet" in answer.json()["error"]
    assert client.get("/hub/api/models/%7Bnot%7D").status_code == 404
    (blobs,) = cache.glob("*/blobs")
    arriving = blobs / "0123.incomplete"
    arriving.touch()
    assert client.get(f"/hub/api/models/{NAME}").status_code == 404
    arriving.unlink()
    assert client.get(f"/hub/api/models/{NAME}").status_code == 200
