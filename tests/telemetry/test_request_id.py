"""The id of a request in log lines."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from ndif.telemetry.request_id import (
    LOG_FORMAT,
    RequestId,
    current,
    name,
    name_requests,
    naming,
)
from tests.on_loop import on_loop


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    """A logger, and the output of its handler."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    name_requests([handler])
    logger = logging.Logger("of-a-test")
    logger.addHandler(handler)
    return logger, written


@pytest.mark.parametrize("given", ["a", "01234567-89ab", "trace:1.2_3", "x" * 64])
def test_valid_request_id_of_client_is_used(given: str) -> None:
    assert RequestId([given]).text == given


@pytest.mark.parametrize(
    "given",
    [
        *([""], ["x" * 65], ["a b"], ["a\nINFO forged"], ["a]"], ["é"], ["\u0661"], ["%0a"]),
        *([], ["two", "ids"]),
    ],
    ids=repr,
)
def test_invalid_request_id_is_replaced(given: list[str]) -> None:
    request_id = RequestId(given)
    assert request_id.text == request_id.text
    assert request_id.text not in given
    assert len(request_id.text) == 32
    assert RequestId(given).text != request_id.text


def test_log_line_names_its_request(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    logger.warning("before")
    with naming(RequestId(["mine"])):
        assert current().text == "mine"
        logger.warning("during")
    logger.warning("after")
    logger.warning("elsewhere", extra={"request_id": "theirs"})
    lines = [line.partition("WARNING ")[2] for line in written.getvalue().splitlines()]
    assert lines == [
        "of-a-test: before",
        "of-a-test [mine]: during",
        "of-a-test: after",
        "of-a-test [theirs]: elsewhere",
    ]


@on_loop
async def test_task_that_outlives_its_request_loses_request_id(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = log
    ended = asyncio.Event()

    async def go_on() -> None:
        logger.warning("begun")
        await ended.wait()
        logger.warning("for others")

    async def request(request_id: RequestId) -> asyncio.Task[None]:
        name(request_id)
        started = asyncio.create_task(go_on())
        await asyncio.sleep(0)
        await asyncio.to_thread(logger.warning, "in a thread")
        request_id.is_open = False
        return started

    going_on = await asyncio.create_task(request(RequestId(["mine"])))
    ended.set()
    await going_on
    lines = [line.partition("WARNING ")[2] for line in written.getvalue().splitlines()]
    assert lines == [
        "of-a-test [mine]: begun",
        "of-a-test [mine]: in a thread",
        "of-a-test: for others",
    ]
