"""`POST /request`: the user of an accepted request, and the answers of a full queue or disk."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import zstandard
from starlette.applications import Starlette

from ndif.cluster.models import Models
from ndif.config.settings import Settings
from ndif.control.operations import Operation
from ndif.control.remote_leader import RemoteLeader
from ndif.gateway.callbacks import CallbackRoute
from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.incoming import Incoming
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.quota import Quota
from ndif.gateway.submit import SubmitRoute
from ndif.host.runtimes import Runtimes
from ndif.queue.callbacks.guard import CallbackRules
from ndif.schema.deployment import DeploymentConfig, OperationError
from ndif.schema.repositories import Repositories
from ndif.schema.request import Request
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.broker.spool import Spool
from ndif.stores.callbacks import SqliteCallbacks
from ndif.stores.objects import FileStore
from ndif.stores.rate_limiter import Rates
from ndif.stores.responder import Responder
from ndif.stores.stores import Stores
from tests.gateway.catalogue import KnownCatalogue
from tests.on_loop import on_loop
from tests.stores.small_disk import fill, small_disk
from tests.waiting import PATIENCE_S

__all__ = ["small_disk"]

KEY = json.dumps({"repo_id": "org/name", "revision": None})
MODEL = f"nnsight.modeling.transformers.TransformersModel:{KEY}"


async def _nothing_ran(_: Operation) -> Any:
    return {"usage": []}


def application(folder: Path, broker: MemoryBroker, settings: Settings | None = None) -> Starlette:
    """Return an application with the real route over `broker`."""
    models = Models([DeploymentConfig("org/name", "org/name", dedicated=True)])
    accounts = OpenAccounts(hotswapping=False, trusted=True)
    settings, objects = settings or Settings(), FileStore(folder, 60)
    queue = SqliteCallbacks(folder.parent / uuid.uuid4().hex)
    submit = SubmitRoute(
        settings,
        Stores(broker, objects, queue, accounts, Responder(broker, objects)),
        KnownCatalogue(models),
        Runtimes(folder / "runtimes"),
        Incoming(settings),
        Quota(settings, _nothing_ran, Rates("")),
        CallbackRoute(settings, CallbackRules((), ()), accounts, queue),
        OpenChannels(settings),
    )
    return Starlette(routes=submit.routes(), exception_handlers=EXCEPTION_HANDLERS)


def accepted(
    folder: Path, headers: Mapping[str, str], client: str = "10.0.0.7", **fields: object
) -> Request:
    """Return the request that results from a POST of `client` with these headers and fields."""

    async def run() -> Request:
        broker = MemoryBroker()
        transport = httpx.ASGITransport(application(folder, broker), client=(client, 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            answer = await http.post(
                "/request",
                data={"data": json.dumps({"model_key": MODEL, "session_id": "", **fields})},
                files={"blob": zstandard.compress(b"opaque")},
                headers={"nnsight-version": "0.8.1", **headers},
            )
        assert answer.status_code == 200, answer.text
        return await asyncio.wait_for(broker.claim(), PATIENCE_S)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NDIF_API_KEY", raising=False)


def test_unverified_key_does_not_identify_user(tmp_path: Path) -> None:
    users = {accepted(tmp_path, {"ndif-api-key": key}).user for key in ("mine", "yours", "")}
    assert users == {"host 10.0.0.7"}


def test_user_of_request_does_not_contain_key(tmp_path: Path) -> None:
    assert "secret" not in accepted(tmp_path, {"ndif-api-key": "secret"}).user


def test_address_identifies_user_without_api_key(tmp_path: Path) -> None:
    users = [accepted(tmp_path, {}, host).user for host in ("10.0.0.7", "10.0.0.8", "10.0.0.7")]
    assert users[0] == users[2] != users[1]
    # A key that looks like an address does not identify that machine's user.
    assert accepted(tmp_path, {"ndif-api-key": users[0]}, "10.0.0.9").user not in users


@pytest.mark.parametrize(("wanted", "trusted"), [(None, True), (True, True), (False, False)])
def test_client_may_request_confinement(tmp_path: Path, wanted: bool | None, trusted: bool) -> None:
    assert accepted(tmp_path, {}, trusted=wanted).trusted is trusted


@pytest.mark.process
@on_loop
async def test_full_disk_is_answered_with_503_and_reason(small_disk: Path) -> None:
    broker = MemoryBroker(spool=Spool(small_disk / "spool", FileStore(small_disk, 60)))
    transport = httpx.ASGITransport(application(small_disk, broker))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:

        async def send(size: int) -> httpx.Response:
            return await http.post(
                "/request",
                data={"data": json.dumps({"model_key": MODEL})},
                files={"blob": bytes(size)},
                headers={"nnsight-version": "0.8.1"},
            )

        assert (await send(60)).status_code == 200
        too_large = await send(2_000_000)  # too large for the disk
        filling = fill(small_disk)
        for refused in (too_large, await send(60), await send(200_000)):
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert "the server's disk is full" in refused.json()["detail"]
        filling.unlink()
        assert (await send(60)).status_code == 200
    await broker.stop()


@on_loop
async def test_full_queue_is_answered_with_503_and_retry_after(tmp_path: Path) -> None:
    broker = MemoryBroker(max_bytes=100)
    transport = httpx.ASGITransport(application(tmp_path, broker))
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


def answer_of(folder: Path, settings: Settings, **headers: str) -> httpx.Response:
    """Return the answer to a POST with these headers."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(application(folder, MemoryBroker(), settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.post(
                "/request",
                data={"data": json.dumps({"model_key": MODEL, "session_id": ""})},
                files={"blob": zstandard.compress(b"opaque")},
                headers={name.replace("_", "-"): value for name, value in headers.items()},
            )

    return asyncio.run(run())


def test_clients_below_minimum_version_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIN_NNSIGHT_VERSION", "0.8.2")
    monkeypatch.setenv("MIN_PYTHON_VERSION", "3.11.4")
    strict = Settings()
    for nnsight in ("0.8.1", "0.8", "0.7.0", "v0.8.1.dev3"):
        refused = answer_of(tmp_path, strict, nnsight_version=nnsight)
        assert refused.status_code == 400
        assert "nnsight 0.8.2 and later" in refused.json()["detail"]
        assert f"yours is {nnsight}. On your side run `pip install" in refused.json()["detail"]
    refused = answer_of(
        tmp_path, strict, nnsight_version="0.8.2", python_version="3.10.12 (main) [GCC]"
    )
    assert "Python 3.11.4 and later; yours is 3.10.12. Run" in refused.json()["detail"]
    # Python patch versions do not matter, and a source tree has no version.
    for headers in (
        {"nnsight_version": "0.8.2", "python_version": "3.11.0"},
        {"nnsight_version": "0.8.10.dev1", "python_version": "3.14.0rc1"},
        {},
    ):
        assert answer_of(tmp_path, strict, **headers).status_code == 200


def test_wait_for_unpublished_status_times_out() -> None:
    class NothingPublished:
        async def read(self, *_: object) -> None:
            return None

    leader = RemoteLeader(
        cast(Any, None),
        cast(Any, NothingPublished()),
        cast(Any, None),
        Repositories(),
        timeout_s=0.01,
        stop=lambda: None,
    )
    with pytest.raises(
        OperationError, match="No process of this server can run a job yet"
    ) as refused:
        asyncio.run(leader.status())
    assert refused.value.status == 503
