"""The limits of two keys of two tiers: each is exceeded by a request and named in its rejection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
import socketio
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect as connect_sync

from ndif.config.settings import Settings
from ndif.control.answers import UsageReport
from ndif.control.operations import GetUsage, Operation
from ndif.gateway.http_error import HttpError
from ndif.gateway.quota import Quota
from ndif.schema.deployment import OperationError
from ndif.schema.limits import KeyLimits
from ndif.server.embedded import Operator
from ndif.stores.accounts import Account, tier_with
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
from ndif.stores.rate_limiter import Rates
from ndif.stores.usage import UsageTotal
from tests.on_loop import on_loop
from tests.security.serving import Gateway, gateway
from tests.stores.callbacks.test_callbacks import a_callback
from tests.waiting import eventually

pytestmark = pytest.mark.process

SMALL = {
    "request_bytes": 2000,
    "unfinished_jobs": 2,
    "result_bytes": 5000,
    "stored_bytes": "6KiB",
    "channels": 2,
}
BRISK = {"requests_per_minute": 3}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A database, and the keys of two tiers."""
    url = f"sqlite:///{tmp_path / 'accounts.sqlite'}"

    async def fill() -> dict[str, str]:
        registry, api_keys = SqlRegistry(Database(url)), {}
        for name, limits in (("small", SMALL), ("brisk", BRISK)):
            await registry.create_tier(tier_with([], name, limits=limits))
            api_keys[name] = (await registry.create_key(name, tiers=[name])).api_key
        await registry.close()
        return api_keys

    return url, asyncio.run(fill())


@pytest.fixture
def keyed(keys: tuple[str, dict[str, str]], runtimes: Path, tmp_path: Path) -> Iterator[Gateway]:
    whose = Operator()
    with gateway(tmp_path / "results", runtimes, whose=whose, database_url=keys[0]) as server:
        yield server


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    if status == 429:
        assert int(answer.headers["Retry-After"]) > 0
    detail: str = answer.json()["detail"]
    assert detail.endswith(".")
    return detail


def test_each_tier_has_its_own_limits(keyed: Gateway, keys: tuple[str, dict[str, str]]) -> None:
    small, brisk = ({"ndif-api-key": key} for key in keys[1].values())
    accepted = [keyed.accepted(keyed.submit(**small)) for _ in range(2)]
    assert {(request.max_result_bytes, request.max_stored_bytes) for request in accepted} == {
        (5000, 6144)
    }
    assert "may have 2 jobs" in refused(keyed.submit(**small), 429)
    assert [keyed.submit(**brisk).status_code for _ in range(3)] == [200] * 3
    assert "3 requests a minute" in refused(keyed.submit(**brisk), 429)
    assert "3 requests a minute" in refused(keyed.submit_old(**brisk), 429)
    large = httpx.post(
        f"{keyed.url}/request",
        content=bytes(2001),
        headers={**small, "nnsight-version": "0.7.0", "nnsight-model-key": "x"},
    )
    assert large.status_code in (400, 413)


@on_loop
async def test_open_channels_per_key_are_limited(
    keyed: Gateway, keys: tuple[str, dict[str, str]]
) -> None:
    address = keyed.url.replace("http", "ws") + "/subscribe"

    def opened(tier: str) -> connect:
        return connect(address, additional_headers={"ndif-api-key": keys[1][tier]})

    async with opened("small") as first, opened("small"), opened("brisk"):
        says = "Your API key may have 2 live channels open at once"
        async with opened("small") as refused_one:
            update = json.loads(await refused_one.recv())
            with pytest.raises(ConnectionClosedError):
                await refused_one.recv()
        assert refused_one.close_code == 4429
        assert update["status"] == "ERROR"
        assert update["description"].startswith(says)
        # nnsight reads the id, sends its job, and shows the rejection.
        sent = keyed.submit(session=update["session_id"], **{"ndif-api-key": keys[1]["small"]})
        assert refused(sent, 429).startswith(says)
        # A closed channel no longer counts.
        await first.close()

        async def may_open() -> bool:
            async with opened("small") as another:
                return "status" not in json.loads(await another.recv())

        await eventually(may_open, lambda: "a closed channel is counted")


def test_open_channels_per_address_are_limited(runtimes: Path, tmp_path: Path) -> None:
    settings = {"dev_mode": True, "max_channels_per_address": 2}
    with (
        gateway(tmp_path / "results", runtimes, **settings) as server,
        contextlib.ExitStack() as held,
    ):

        def open_one() -> None:
            client = held.enter_context(socketio.SimpleClient())
            client.connect(server.url, socketio_path="/ws/socket.io", transports=["websocket"])

        open_one()
        open_one()
        errors: list[dict[str, str]] = []
        client = socketio.Client()
        client.on("connect_error", errors.append)
        with pytest.raises(socketio.exceptions.ConnectionError):
            client.connect(server.url, socketio_path="/ws/socket.io", transports=["websocket"])
        assert "Your address may have 2 live channels open at once" in errors[0]["message"]
        # The channels of both wires count together.
        with connect_sync(f"ws{server.url[4:]}/subscribe") as channel:
            update = json.loads(channel.recv())
        assert update["description"].startswith(
            "Your address may have 2 live channels open at once"
        )
        sent = refused(server.submit(session=update["session_id"]), 429)
        assert sent == update["description"]


def test_waiting_jobs_per_model_are_limited(runtimes: Path, tmp_path: Path) -> None:
    settings = {"dev_mode": True, "max_queue_depth": 2}
    with gateway(tmp_path / "results", runtimes, **settings) as server:
        server.accepted(server.submit())
        server.accepted(server.submit_old())
        for refusal in (server.submit(), server.submit_old()):
            assert "of all its users together" in refused(refusal, 429)


def test_waiting_callbacks_per_user_are_limited(runtimes: Path, tmp_path: Path) -> None:
    settings = {"dev_mode": True, "max_callbacks": 2}
    named = {"ndif-callback": "https://example.org/done"}
    with gateway(tmp_path / "results", runtimes, **settings) as server:
        user = server.accepted(server.submit_old(**named)).user
        for _ in range(2):
            asyncio.run(server.server.stores.callbacks.add(replace(a_callback(), user=user)))
        assert "2 webhooks or mails of your jobs wait" in refused(server.submit_old(**named), 429)
        server.accepted(server.submit_old())


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_over_limit_of_key_is_rejected_while_it_arrives(
    keyed: Gateway, keys: tuple[str, dict[str, str]], is_chunked: bool
) -> None:
    from tests.security.serving import OLD

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(1000)

    answer = httpx.post(
        f"{keyed.url}/request",
        content=pieces() if is_chunked else bytes(100_000),
        headers={
            "ndif-api-key": keys[1]["small"],
            "nnsight-version": "0.7.0",
            "nnsight-model-key": OLD,
        },
    )
    assert "your API key may send" in refused(answer, 413)


class UsageOf:
    """A stand-in for usage records with a fixed execution time."""

    def __init__(self) -> None:
        self.ran_s: float | None = 0.0
        self.asked: list[Operation] = []

    async def perform(self, operation: Operation) -> UsageReport:
        self.asked.append(operation)
        if self.ran_s is None:
            raise OperationError(503, "it is away")
        total = UsageTotal(name="day", jobs=1, errors=0, execution_s=self.ran_s, result_bytes=0)
        return UsageReport(by="day", since=None, usage=[total])


def quota_of(usage: UsageOf, **settings: Any) -> Quota:
    return Quota(Settings(**settings), usage.perform, Rates(""))


@on_loop
async def test_execution_time_per_day_is_limited() -> None:
    usage = UsageOf()
    account = Account("ada", key="k", limits={"execution_s_per_day": "1h"})
    for ran_s, is_refused in ((3599.0, False), (3600.0, True), (None, False)):
        usage.ran_s = ran_s
        quota = quota_of(usage)
        limits = quota.limits_of(account)
        if not is_refused:
            await quota.admit(account, limits)
            continue
        with pytest.raises(HttpError, match="have run 1h today, and may run 1h a day") as error:
            await quota.admit(account, limits)
        assert error.value.status_code == 429
        assert 0 < int((error.value.headers or {})["Retry-After"]) <= 86_400
        # The usage is cached for a while.
        asked = len(usage.asked)
        with pytest.raises(HttpError):
            await quota.admit(account, limits)
        assert len(usage.asked) == asked
    today = datetime.now(timezone.utc).date().isoformat()
    assert usage.asked[0] == GetUsage(by="day", since=today, user="ada")


def test_tier_limits_override_server_limits_and_null_removes_them() -> None:
    settings = Settings(max_requests_per_minute=5, max_unfinished_jobs=7)
    server = KeyLimits(requests_per_minute=5, unfinished_jobs=7, queue_depth=10_000, channels=1000)
    assert KeyLimits.of(settings, {}) == server
    own = {"requests_per_minute": None, "request_bytes": "1KiB"}
    changed = {**server.model_dump(exclude_unset=True), **own}
    assert KeyLimits.of(settings, own) == KeyLimits.model_validate(changed)
    # Invalid limits in the database are ignored.
    assert KeyLimits.of(settings, {"colour": "red"}) == server
    quota = quota_of(UsageOf(), max_unfinished_jobs=7)
    assert quota.limits_of(Account("host 10.0.0.1")) == KeyLimits(queue_depth=10_000)
