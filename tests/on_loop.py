"""Decorators and a fixture for tests with coroutines: each has its own event loop and a time limit."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import pytest
import uvloop

from ndif.simulation import virtual_time
from tests.waiting import PATIENCE_S

P = ParamSpec("P")


def on_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run the coroutine function `test` to its end; pytest still sees its signature and fixtures."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            await asyncio.wait_for(test(*args, **kwargs), PATIENCE_S)

        asyncio.run(whole())

    return run


def on_virtual_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run `test` in virtual time, whatever the machine's speed; it may use no thread, process or socket."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            await asyncio.wait_for(test(*args, **kwargs), PATIENCE_S)

        virtual_time.run(whole())

    return run


Play = Callable[[Callable[[], Awaitable[None]]], None]
"""Runs a coroutine function to its end."""


@pytest.fixture(params=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Play:
    """A function that runs a scene on asyncio's event loop and, in another test, on uvloop's."""

    def run(scene: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await asyncio.wait_for(scene(), PATIENCE_S)

        (uvloop.run if request.param == "uvloop" else asyncio.run)(whole())

    return run
