"""The steps of a request: their recording, and their log events with job and account."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.step import GATEWAY, QUEUE, REPLICA, RUNNER, Step, in_order, steps_from
from ndif.telemetry.logs import STEPS
from ndif.telemetry.steps import Steps, current, recording, step
from tests.on_loop import on_loop

pytestmark = pytest.mark.process

KEY = (
    "nnsight.modeling.transformers.TransformersModel:" + '{"repo_id": "org/name", "revision": null}'
)


def a_request() -> Request:
    model = ModelKey.parse(KEY)
    return Request(model, "0.8", Wire.ENVELOPE, b"", False, "", key="0123456789abcdef", id="an-id")


def test_step_is_recorded_even_if_its_block_fails() -> None:
    steps = Steps(a_request(), QUEUE)
    before = time.time()
    with recording(steps), pytest.raises(ValueError, match="no"), step("store"):
        raise ValueError("no")
    (recorded,) = steps.all
    assert (recorded.name, recorded.by) == ("store", REPLICA)
    assert before <= recorded.start <= recorded.end <= time.time()
    assert current() is None
    with step("of nobody"):
        pass
    assert steps.all == (recorded,)


@on_loop
async def test_tasks_record_for_the_request_that_started_them() -> None:
    async def work() -> None:
        with step("acquire"):
            await asyncio.sleep(0.01)

    async def serve(steps: Steps) -> None:
        with recording(steps):
            await asyncio.create_task(work())

    ours, theirs = Steps(a_request(), QUEUE), Steps(a_request(), QUEUE)
    await asyncio.gather(serve(ours), serve(theirs))
    assert [[recorded_step.name for recorded_step in steps.all] for steps in (ours, theirs)] == [
        ["acquire"]
    ] * 2


def test_only_first_and_last_steps_are_kept() -> None:
    steps = Steps(a_request(), QUEUE)
    for number in range(1000):
        steps.add(str(number), number, number + 1)
    names = [int(recorded_step.name) for recorded_step in steps.all]
    assert len(names) == 60
    assert names[:20] == [*range(20)]
    assert names[20:] == [*range(960, 1000)]


def test_step_has_no_duration_if_clock_was_set_back() -> None:
    assert Step("run", QUEUE, 10.0, 9.0).took_s == 0


def test_steps_of_unknown_parts_are_omitted() -> None:
    assert steps_from([["a", QUEUE, 1.0, 2.0], ["b", "a later part", 1.0, 2.0]]) == (
        Step("a", QUEUE, 1.0, 2.0),
    )


def test_step_event_names_job_model_and_account(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(a_request(), GATEWAY)
    steps.replica = "r1"
    with caplog.at_level(logging.INFO, STEPS):
        steps.add("receive", 1.0, 1.25)
    (event,) = caplog.records
    fields = {name: value for name, value in vars(event).items() if name in vars(event)}
    expected = {"job": "an-id", "model": "org/name", "nnsight": "0.8", "account": "0123456789ab"}
    expected |= {"step": "receive", "by": GATEWAY, "replica": "r1"}
    assert {name: fields[name] for name in expected} == expected
    assert fields["duration_s"] == 0.25
    assert event.getMessage() == "job an-id: receive took 0.250 s"


def test_step_event_is_omitted_below_log_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, STEPS):
        Steps(a_request(), GATEWAY).add("receive", 1.0, 1.25)
    assert not caplog.records


def test_steps_with_same_start_are_in_order_of_job() -> None:
    steps = [
        Step("execute", RUNNER, 1.0, 3.0),
        Step("later", QUEUE, 1.0, 2.0),
        Step("prepare", RUNNER, 1.0, 1.0),
        Step("receive", GATEWAY, 2.0, 2.1),
    ]
    assert [step.name for step in in_order(steps)] == ["prepare", "execute", "later", "receive"]
