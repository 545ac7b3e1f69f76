"""A single-process server before it has loaded a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
from huggingface_hub import snapshot_download
from starlette.applications import Starlette
from starlette.testclient import TestClient

from ndif.config.settings import Settings
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.server.embedded import Operator, Server
from ndif.stores.broker import MemoryBroker
from ndif.stores.broker.spool import SPOOL, Spool
from ndif.stores.objects import FileStore
from ndif.stores.objects.port import end_key
from ndif.stores.responder import Responder
from tests.conftest import NAME
from tests.on_loop import on_loop
from tests.stores.broker.test_spool import a_request

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def cache(hub_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub cache with the tiny model."""
    folder = tmp_path_factory.mktemp("hub-cache")
    snapshot_download(NAME, endpoint=hub_url, cache_dir=folder)
    return folder


@pytest.fixture
def client(
    tiny_gpt2: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TestClient:
    """A client of a server that does not load its models."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    models = [
        DeploymentConfig("my-lab/folder", str(tiny_gpt2)),
        DeploymentConfig(NAME, NAME),
        DeploymentConfig("my-lab/elsewhere", "my-lab/elsewhere"),
    ]
    server = Server(Settings(dev_mode=True), models, tmp_path, Operator(), host="127.0.0.1")
    return TestClient(server.app, "http://127.0.0.1")  # without its lifespan, nothing is loaded


@pytest.mark.parametrize("name", ["my-lab/folder", NAME, NAME.upper()])
def test_model_files_are_served_before_model_is_loaded(name: str, client: TestClient) -> None:
    info = client.get(f"/hub/api/models/{name}").json()
    assert (info["id"].lower(), info["pipeline_tag"]) == (name.lower(), "text-generation")
    assert client.get(f"/hub/{name}/resolve/main/config.json").json()["model_type"] == "gpt2"
    assert client.get(f"/hub/{name}/resolve/main/model.safetensors").status_code == 404


def test_missing_and_partial_model_files_are_not_found(client: TestClient, cache: Path) -> None:
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


@on_loop
async def test_job_that_ended_before_server_was_killed_does_not_run_again(tmp_path: Path) -> None:
    """The server was killed between a job's end and the removal of its request, and restarts much later."""
    objects, request = FileStore(tmp_path, 60), a_request()
    spool = Spool(tmp_path / SPOOL, objects)
    await spool.add(request)
    await spool.close()
    await Responder(MemoryBroker(), objects).respond(request, Response(request.id, Status.ERROR))
    os.utime(objects.path(end_key(request.id)), (0, 0))
    server = Server(Settings(dev_mode=True), [], tmp_path, Operator(), host="127.0.0.1")
    assert server.is_polled, "its end may be asked for, though its update is gone"
    async with server._lifespan(cast(Starlette, None)):
        assert server.unfinished == 0
    assert not server.is_polled
