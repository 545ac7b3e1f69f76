"""Whose a request is, as the gateway sees it: real HTTP into the real route, read off the broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
import zstandard
from starlette.applications import Starlette

from ndif.cluster.models import Models
from ndif.config import Settings
from ndif.gateway.catalogue import OwnCatalogue
from ndif.gateway.submit import Submit
from ndif.host.runtimes import Runtimes
from ndif.queue.responder import Responder
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore

KEY = json.dumps({"repo_id": "org/name", "revision": None})
MODEL = f"nnsight.modeling.transformers.TransformersModel:{KEY}"


def accepted(folder: Path, headers: Mapping[str, str], client: str = "10.0.0.7") -> Request:
    """The request that comes of a POST from a machine, with headers beside those every client sends."""

    async def run() -> Request:
        broker = MemoryBroker()
        models = Models([DeploymentConfig("org/name", "org/name", dedicated=True)])
        submit = Submit(
            Settings(),
            broker,
            Responder(broker, FileStore(folder, 60)),
            Runtimes(folder / "runtimes"),
            OwnCatalogue(models, dict, lambda: True),
            OpenAccounts(hotswapping=False, trusted=True),
        )
        transport = httpx.ASGITransport(Starlette(routes=submit.routes()), client=(client, 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            answer = await http.post(
                "/request",
                data={"data": json.dumps({"model_key": MODEL, "session_id": ""})},
                files={"blob": zstandard.compress(b"opaque")},
                headers={"nnsight-version": "0.8.1", **headers},
            )
        assert answer.status_code == 200, answer.text
        return await asyncio.wait_for(broker.claim(), 5)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NDIF_API_KEY", raising=False)


def test_holders_of_two_keys_are_two_users_wherever_they_are(tmp_path: Path) -> None:
    mine = {
        accepted(tmp_path, {"ndif-api-key": "mine"}, host).user for host in ("10.0.0.7", "10.0.0.8")
    }
    yours = accepted(tmp_path, {"ndif-api-key": "yours"}).user
    assert len(mine) == 1
    assert yours not in mine


def test_a_key_is_not_written_where_its_user_is(tmp_path: Path) -> None:
    assert "secret" not in accepted(tmp_path, {"ndif-api-key": "secret"}).user


def test_without_keys_machines_are_users(tmp_path: Path) -> None:
    users = [accepted(tmp_path, {}, host).user for host in ("10.0.0.7", "10.0.0.8", "10.0.0.7")]
    assert users[0] == users[2] != users[1]
    # Nobody gets into another's place by a key that reads like an address.
    assert accepted(tmp_path, {"ndif-api-key": users[0]}).user not in users
