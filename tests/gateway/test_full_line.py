"""A server that holds as much as it may, as a client meets it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from starlette.applications import Starlette
from tests.on_loop import on_loop

from ndif.cluster.models import Models
from ndif.config import Settings
from ndif.gateway.catalogue import OwnCatalogue
from ndif.gateway.refusal import answer_broker_away
from ndif.gateway.submit import Submit
from ndif.host.runtimes import Runtimes
from ndif.queue.responder import Responder
from ndif.schema.deployment import DeploymentConfig
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import BrokerError, MemoryBroker
from ndif.stores.objects import FileStore

MODEL = 'nnsight.modeling.transformers.TransformersModel:{"repo_id": "org/name"}'


@on_loop
async def test_who_comes_to_a_full_line_is_told_when_to_come_again(tmp_path: Path) -> None:
    broker = MemoryBroker(max_bytes=100)
    models = Models([DeploymentConfig("org/name", "org/name", dedicated=True)])
    submit = Submit(
        Settings(),
        broker,
        Responder(broker, FileStore(tmp_path, 60)),
        Runtimes(tmp_path / "runtimes"),
        OwnCatalogue(models, dict, lambda: True),
        OpenAccounts(hotswapping=False, trusted=True),
    )
    app = Starlette(routes=submit.routes(), exception_handlers={BrokerError: answer_broker_away})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:

        async def send() -> httpx.Response:
            return await http.post(
                "/request",
                data={"data": json.dumps({"model_key": MODEL})},
                files={"blob": bytes(60)},
                headers={"nnsight-version": "0.8.1"},
            )

        assert (await send()).status_code == 200
        refused = await send()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "NDIF_MAX_QUEUED_BYTES" in refused.json()["detail"]
        await broker.release(await broker.claim())
        assert (await send()).status_code == 200
