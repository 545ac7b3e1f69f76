"""The delivery loop: pauses, limits, order, concurrency and internal errors."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest

from ndif.delivery.loop import Delivery, DeliveryError, Policy
from ndif.stores.broker import BrokerError
from ndif.tasks import end
from tests.on_loop import on_loop
from tests.waiting import eventually, time_passes_async

POLICY = Policy()


@dataclass(frozen=True)
class Letter:
    """A message of tests."""

    id: str
    host: str = "host"
    due: float = 0.0
    attempts: int = 0


class Letters(Delivery[Letter]):
    """A delivery of letters in memory with scripted errors."""

    name = "letters"

    def __init__(
        self, items: Sequence[Letter], policy: Policy, answers: dict[str, list[Exception]]
    ) -> None:
        super().__init__(policy, lambda: 100.0)
        self.waiting = {item.id: item for item in items}
        self.answers = answers
        """Errors of the next attempts, by message id."""
        self.tried: list[str] = []
        self.dead: dict[str, str] = {}
        self.pauses: list[float] = []
        self.at_once = self.most_at_once = 0
        self.gate = asyncio.Event()

    def title(self, item: Letter) -> str:
        return f"letter {item.id}"

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Letter]:
        item = (item for item in self.waiting.values() if item.due <= now)
        return [item for item in item if item.host not in busy][:limit]

    async def wait(self, seconds: float) -> None:
        await time_passes_async(min(seconds, 0.01))

    async def attempt(self, item: Letter) -> None:
        self.tried.append(item.id)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self.gate.wait()
        finally:
            self.at_once -= 1
        if errors := self.answers.get(item.id):
            raise errors.pop(0)
        del self.waiting[item.id]

    async def failed(self, item: Letter, error: DeliveryError) -> None:
        attempts = item.attempts + 1
        pause_s = self.pause_s(attempts, 0.0, error)
        if pause_s is None:
            self.dead[item.id] = str(error)
            del self.waiting[item.id]
        else:
            self.pauses.append(pause_s)
            self.waiting[item.id] = replace(item, attempts=attempts)


def letters(*items: Letter, policy: Policy = POLICY, **answers: list[Exception]) -> Letters:
    return Letters(items, policy, answers)


async def until_done(sender: Letters) -> None:
    sender.gate.set()
    running = asyncio.create_task(sender.run())
    try:
        await eventually(lambda: not sender.waiting)
    finally:
        await end([running])


def test_pauses_between_attempts_grow_and_end() -> None:
    age_s, pauses = 0.0, []
    for attempts in range(1, 20):
        pause_s = POLICY.pause_s(attempts, age_s, 0.5)
        if pause_s is None:
            break
        pauses.append(pause_s)
        age_s += pause_s
    assert pauses == [5, 15, 45, 135, 405, 1215, 3645, 10935, 14400]
    assert age_s < POLICY.max_age_s


def test_pauses_have_jitter() -> None:
    pauses = [POLICY.pause_s(1, 100.0, chance) for chance in (0.0, 0.5, 1.0)]
    assert pauses == [3.75, 5.0, 6.25]


def test_message_that_would_be_too_old_is_dropped() -> None:
    policy = Policy(max_age_s=60.0)
    assert policy.pause_s(1, 50.0, 0.5) == 5.0
    assert policy.pause_s(1, 56.0, 0.5) is None


def test_receiver_may_request_longer_pause_within_limit() -> None:
    policy = Policy(max_attempts=inf, max_age_s=inf, longest_s=600.0, jitter=0.0)
    assert [policy.pause_s(2, 0.0, 0.5, wait_s) for wait_s in (1, 60, 9e9)] == [15, 60, 600]
    # Without a limit of attempts, the pause stays at its maximum.
    assert policy.pause_s(5000, 9e9, 0.5) == 600


@on_loop
async def test_failed_message_is_retried_until_limit_or_final_error() -> None:
    busy = [DeliveryError("busy", wait_s=0.7), DeliveryError("busy")]
    sender = letters(
        *(Letter("again", "1"), Letter("often", "2"), Letter("gone", "3"), Letter("well", "4")),
        again=[*busy],
        often=[*busy, DeliveryError("still busy")],
        gone=[DeliveryError("gone", final=True)],
        policy=Policy(max_attempts=3, first_s=0.1, factor=2.0, jitter=0.0),
    )
    await until_done(sender)
    assert sender.dead == {"often": "still busy", "gone": "gone"}
    assert sorted(sender.tried) == sorted(["again", "often"] * 3 + ["gone", "well"])
    assert sorted(sender.pauses) == [0.2, 0.2, 0.7, 0.7]


@pytest.mark.parametrize(("most", "tried"), [(3, 3), (inf, 1)])
@on_loop
async def test_internal_error_costs_attempt_or_message(most: float, tried: int) -> None:
    policy = Policy(max_attempts=most, first_s=0.01)
    sender = letters(Letter("a"), a=[ZeroDivisionError() for _ in range(9)], policy=policy)
    await until_done(sender)
    assert sender.dead == {"a": "the server failed; its log says why"}
    assert len(sender.tried) == tried


@on_loop
async def test_concurrency_per_receiver_is_limited_without_delaying_others() -> None:
    sender = letters(*(Letter(f"{n}") for n in range(9)), Letter("other", "elsewhere"))
    running = asyncio.create_task(sender.run())
    await eventually(lambda: "other" in sender.tried)
    assert sender.at_once == 3
    sender.gate.set()
    await eventually(lambda: not sender.waiting)
    await end([running])
    assert len(sender.tried) == 10


@on_loop
async def test_total_concurrency_is_limited() -> None:
    sender = letters(*(Letter(f"{n}", f"host {n}") for n in range(9)), policy=Policy(at_once=4))
    running = asyncio.create_task(sender.run())
    await eventually(lambda: sender.at_once == 4)
    sender.gate.set()
    await eventually(lambda: not sender.waiting)
    await end([running])
    assert sender.most_at_once == 4


@on_loop
async def test_receiver_limited_to_one_gets_messages_in_order() -> None:
    policy = Policy(first_s=0.0, to_one_host=1)
    name = letters(
        *(Letter(sender) for sender in "abcde"), a=[DeliveryError("busy")], policy=policy
    )
    await until_done(name)
    assert name.tried == [*"aabcde"]


@on_loop
async def test_next_loop_repeats_interrupted_attempt() -> None:
    sender = letters(Letter("a"))
    running = asyncio.create_task(sender.run())
    await eventually(lambda: sender.at_once)
    await end([running])
    assert sender.at_once == 0
    await until_done(sender)
    assert sender.tried == ["a", "a"]


@on_loop
async def test_unavailable_store_costs_no_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ndif.delivery.loop._RETRY_S", 0.01)
    sender = letters(Letter("a"), a=[BrokerError("it is away")], policy=Policy(max_attempts=1))
    await until_done(sender)
    assert sender.tried == ["a", "a"]
    assert "letter a may be delivered twice: it is away" in caplog.text


class SlowLetters(Letters):
    """Letters in a store that answers slowly."""

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Letter]:
        items = await super().due(now, limit, busy)
        await asyncio.sleep(0.01)
        return items

    async def attempt(self, item: Letter) -> None:
        await time_passes_async(int(item.id) % 7 * 0.002)
        await super().attempt(item)


@on_loop
async def test_message_delivered_during_store_read_is_not_sent_again() -> None:
    sender = SlowLetters([Letter(f"{n}", f"host {n % 5}") for n in range(30)], POLICY, {})
    await until_done(sender)
    assert sorted(sender.tried, key=int) == [f"{n}" for n in range(30)]
