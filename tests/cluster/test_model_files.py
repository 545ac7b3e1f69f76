"""The files of accepted models on the leader's machine, and their copies for gateways on other machines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.cluster import model_files
from ndif.cluster.controller import Controller
from ndif.cluster.model_files import ModelFilesStorage, StoredFiles
from ndif.cluster.models import Models
from ndif.cluster.replica import Replica
from ndif.control.publisher import Publisher
from ndif.gateway import hf_mirror
from ndif.gateway.hf_mirror import HfMirror, MirroredModel, PublishedModels
from ndif.schema.deployment import DeploymentConfig
from ndif.stores.leader import SharedCache
from ndif.stores.objects import FileStore, ObjectStoreError
from ndif.stores.redis import connect
from ndif.tasks import end
from tests.on_loop import on_loop
from tests.services.redis import RedisServer
from tests.serving import serving
from tests.stores.broker.signers import SIGNER

pytestmark = pytest.mark.engine

NAME = "org/name"


class AwayAtFirst(FileStore):
    """An object store that cannot be reached at first."""

    is_away = True

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        if self.is_away:
            self.is_away = False
            raise ObjectStoreError("it is away")
        await super().put(key, content, soon=soon)


def unasked(*_: object) -> Any:
    raise NotImplementedError


@contextlib.asynccontextmanager
async def published(
    redis: RedisServer, models: Models, objects: FileStore, folder: Path
) -> AsyncIterator[str]:
    """Run a leader that publishes files; yield the URL of another machine's gateway hub."""
    redis.command("flushall")
    client = connect(redis.url)
    storing = ModelFilesStorage(models, objects)
    controller = Controller(models, unasked, unasked, unasked)  # nothing is deployed
    publisher = Publisher(controller, storing, SharedCache(client, SIGNER), life_s=60.0)
    gateway = PublishedModels(SharedCache(client, SIGNER), objects)
    mirror = HfMirror(share_weights=False, find=gateway.find)
    running = (storing.run(), publisher.run(), gateway.run(mirror))
    tasks = [asyncio.create_task(coroutine) for coroutine in running]
    try:
        with serving(Starlette(routes=[Mount("/hub", routes=mirror.routes())])) as url:
            yield f"{url}/hub"
    finally:
        await end(tasks)
        await client.aclose()


async def until_served(url: str) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        while (answer := await http.get(url)).status_code != httpx.codes.OK:  # noqa: ASYNC110 - another's
            await asyncio.sleep(0.05)
    return answer


@on_loop
async def test_model_files_are_served_before_any_replica_is_up(
    redis: RedisServer, tmp_path: Path, tiny_gpt2: Path
) -> None:
    config = DeploymentConfig(NAME, str(tiny_gpt2), dedicated=True)
    elsewhere = DeploymentConfig("org/elsewhere", "org/elsewhere", dedicated=True)
    private = replace(config, repo_id="org/own", revision="a-users-own", dedicated=False)
    models = Models([elsewhere, config])
    models.put(private).on_demand = True
    objects = FileStore(tmp_path / "objects", 3600)
    async with published(redis, models, objects, tmp_path) as url:
        info = (await until_served(f"{url}/api/models/{NAME}")).json()
        assert (info["id"], info["pipeline_tag"]) == (NAME, "text-generation")
        answer = await until_served(f"{url}/{NAME}/resolve/main/config.json")
        assert answer.content == (tiny_gpt2 / "config.json").read_bytes()
        async with httpx.AsyncClient() as http:
            for absent in (
                f"{url}/api/models/org/elsewhere",
                f"{url}/api/models/org/own",
                f"{url}/{NAME}/resolve/main/model.safetensors",
            ):
                assert (await http.get(absent)).status_code == httpx.codes.NOT_FOUND
        # A model deployed later is served, too.
        models.put(replace(config, repo_id="org/later"))
        assert (await until_served(f"{url}/api/models/org/later")).json()["id"] == "org/later"


@on_loop
async def test_gateway_reads_published_files_when_client_asks(
    redis: RedisServer, tmp_path: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_mirror, "_INTERVAL_S", 3600.0)
    models = Models([])
    async with published(redis, models, FileStore(tmp_path / "objects", 3600), tmp_path) as url:
        async with httpx.AsyncClient() as http:
            absent = await http.get(f"{url}/api/models/{NAME}")
        assert absent.status_code == httpx.codes.NOT_FOUND
        models.put(DeploymentConfig(NAME, str(tiny_gpt2), dedicated=True))
        assert (await until_served(f"{url}/api/models/{NAME}")).json()["id"] == NAME


def test_clients_get_files_that_replica_loaded(tmp_path: Path) -> None:
    config = DeploymentConfig(NAME, "org/name", dedicated=True)
    models = Models([config])
    storing = ModelFilesStorage(models, FileStore(tmp_path, 3600))
    actor = SimpleNamespace(model=SimpleNamespace(files="hub/a.zip"))
    replica = SimpleNamespace(is_up=True, model=next(iter(models)), actor=actor)
    assert storing.stored == {}
    storing.record([cast(Replica, replica)])
    entry = StoredFiles("hub/a.zip", None, None)
    # The files stay after the replica is gone, until the model has another checkpoint.
    assert storing.stored == {NAME: entry}
    models.put(replace(config, checkpoint="/another/folder"))
    assert storing.stored == {}


FIND = """
import json, sys
from ndif.cluster.model_files import ModelFinder
from ndif.cluster.models import Models
from ndif.schema.deployment import DeploymentConfig
finder, absent = ModelFinder(), DeploymentConfig("org/absent", "org/absent")
models = Models([DeploymentConfig("org/name", "org/name"), absent])
for model in models:
    found = finder.find(model)
    print(json.dumps(found and {
        "names": sorted(found.source.files), "withheld": sorted(found.source.withheld),
        "commit": found.source.commit, "task": found.task,
        "config": found.source.files["config.json"].read_text(),
    }))
    assert finder.find(model) == found
"""


def test_shared_files_of_remote_model_come_from_hub(tmp_path: Path, tiny_gpt2: Path) -> None:
    hub = HfMirror(share_weights=True)
    hub.serve(MirroredModel("org/name", tiny_gpt2, None, "text-generation"))
    with serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as url:
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        process = subprocess.run(
            [sys.executable, "-c", FIND],
            env={
                **os.environ,
                "HF_ENDPOINT": f"{url}/hub",
                "HF_HUB_OFFLINE": "0",
                "HF_HOME": str(tmp_path / "home"),
                "TMPDIR": str(temporary),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        info = httpx.get(f"{url}/hub/api/models/org/name").json()
    present, absent = map(json.loads, process.stdout.splitlines())
    assert absent is None
    everything = {path.name for path in tiny_gpt2.iterdir()}
    assert "config.json" in present["names"]
    assert "tokenizer.json" in present["names"]
    assert {*present["names"], *present["withheld"]} == everything
    assert "model.safetensors" in present["withheld"]
    assert (present["commit"], present["task"]) == (info["sha"], "text-generation")
    assert present["config"] == (tiny_gpt2 / "config.json").read_text()
    # A cached ref would lead a client on this machine to a commit without weights; the rest is deleted.
    assert not list((tmp_path / "home").glob("hub/models--*"))
    assert not list(temporary.iterdir())


@on_loop
async def test_upload_to_unavailable_store_is_retried(
    redis: RedisServer, tmp_path: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_LOOK_AGAIN_S", 0.1)
    models = Models([DeploymentConfig(NAME, str(tiny_gpt2), dedicated=True)])
    objects = AwayAtFirst(tmp_path / "objects", 3600)
    async with published(redis, models, objects, tmp_path) as url:
        await until_served(f"{url}/api/models/{NAME}")
    assert not objects.is_away
