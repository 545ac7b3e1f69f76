"""Requests per minute never exceed the limit, with one gateway or several."""

from __future__ import annotations

import asyncio

import pytest

from ndif.stores.rate_limiter import Rates, RatesUnavailableError, Windows
from tests.on_loop import on_loop
from tests.services.redis import RedisServer

pytestmark = pytest.mark.engine


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    """No broker, or an empty Redis."""
    if request.param == "memory":
        return ""
    server: RedisServer = request.getfixturevalue("redis")
    server.command("flushall")
    return server.url


@on_loop
async def test_concurrent_requests_respect_rate_limit(url: str) -> None:
    rates = Rates(url)
    # With Redis, two gateways count together.
    others = Rates(url) if url else rates
    waits = await asyncio.gather(*((rates, others)[n % 2].take("a", 20) for n in range(60)))
    assert waits.count(0.0) == 20
    assert all(1 <= wait <= 60 for wait in waits if wait)
    assert await rates.take("b", 20) == 0


@on_loop
async def test_rate_window_may_be_longer_than_a_minute(url: str) -> None:
    rates = Rates(url)
    waits = [await rates.take("a", 2, minutes=10) for _ in range(3)]
    assert waits[:2] == [0.0, 0.0]
    assert 590 <= waits[2] <= 600


@on_loop
async def test_unavailable_redis_raises_rates_away(redis: RedisServer) -> None:
    with pytest.raises(RatesUnavailableError):
        await Rates("redis://127.0.0.1:1").take("a", 20)


def test_in_memory_rate_window_slides() -> None:
    windows = Windows()
    waits = [windows.take("a", 2, 60, now) for now in (1000.0, 1030.0, 1040.0, 1061.0, 1062.0)]
    assert waits == [0, 0, 20, 0, 28]
    # A lowered limit counts requests that it would have refused.
    assert windows.take("a", 1, 60, 1063.0) == 58
    assert windows.take("a", 0, 60, 1063.0) == 60


def test_inactive_names_are_forgotten() -> None:
    windows = Windows()
    for number in range(100):
        windows.take(str(number), 2, 60, 1000.0)
    windows.take("long", 2, 600, 1000.0)
    windows.take("now", 2, 60, 1050.0)
    windows.take("now", 2, 60, 1061.0)
    assert [*windows._windows] == ["long", "now"]
