"""The rules of a delivery: pauses and their end, order, how many at once, and the server's own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import inf

import pytest

from ndif.delivery.loop import DeliveryError, DeliveryLoop, Policy
from ndif.stores.broker import BrokerError
from ndif.tasks import end
from tests.on_loop import on_loop
from tests.waiting import eventually


@dataclass(frozen=True)
class Letter:
    """A message of tests."""

    id: str
    host: str = "host"
    created: float = 0.0
    due: float = 0.0
    attempts: int = 0


@dataclass
class Letters:
    """An outbox in memory, whose receivers answer as they are told."""

    waiting: dict[str, Letter]
    answers: dict[str, list[Exception]] = field(default_factory=dict)
    """Errors of the next attempts, by the message."""
    name = "letters"
    tried: list[str] = field(default_factory=list)
    dead: dict[str, str] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def title(self, item: Letter) -> str:
        return f"letter {item.id}"

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Letter]:
        found = (each for each in self.waiting.values() if each.due <= now)
        return [each for each in found if each.host not in busy][:limit]

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))

    async def attempt(self, item: Letter) -> bool:
        self.tried.append(item.id)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self.gate.wait()
        finally:
            self.at_once -= 1
        if errors := self.answers.get(item.id):
            raise errors.pop(0)
        return True

    async def delivered(self, item: Letter) -> None:
        del self.waiting[item.id]

    async def failed(self, item: Letter, error: DeliveryError, pause_s: float | None) -> None:
        if pause_s is None:
            self.dead[item.id] = str(error)
            del self.waiting[item.id]
        else:
            self.pauses.append(pause_s)
            self.waiting[item.id] = replace(item, attempts=item.attempts + 1)


def letters(*items: Letter, **answers: list[Exception]) -> Letters:
    return Letters({each.id: each for each in items}, answers)


async def until_done(outbox: Letters, policy: Policy) -> None:
    outbox.gate.set()
    running = asyncio.create_task(DeliveryLoop(outbox, policy, lambda: 100.0).run())
    try:
        await eventually(lambda: not outbox.waiting)
    finally:
        await end([running])


def test_the_pauses_between_attempts_grow_and_end() -> None:
    policy = Policy()
    now, pauses = 0.0, []
    for attempts in range(20):
        pause_s = policy.pause_s(Letter("a", attempts=attempts), now, 0.5)
        if pause_s is None:
            break
        pauses.append(pause_s)
        now += pause_s
    assert pauses == [5, 15, 45, 135, 405, 1215, 3645, 10935, 14400]
    assert now < policy.max_age_s


def test_the_pauses_have_a_jitter() -> None:
    pauses = [Policy().pause_s(Letter("a"), 100.0, chance) for chance in (0.0, 0.5, 1.0)]
    assert pauses == [3.75, 5.0, 6.25]


def test_one_that_would_be_too_old_is_given_up() -> None:
    policy = Policy(max_age_s=60.0)
    assert policy.pause_s(Letter("a"), 50.0, 0.5) == 5.0
    assert policy.pause_s(Letter("a"), 56.0, 0.5) is None


def test_a_receiver_may_ask_for_a_longer_pause_within_limits() -> None:
    policy = Policy(max_attempts=inf, max_age_s=inf, longest_s=600.0, jitter=0.0)
    letter = Letter("a", attempts=1)
    assert [policy.pause_s(letter, 0.0, 0.5, wait_s) for wait_s in (1, 60, 9e9)] == [15, 60, 600]
    # Without a limit of attempts the pauses stay the longest.
    assert policy.pause_s(Letter("a", attempts=5000), 0.0, 0.5) == 600


@on_loop
async def test_what_fails_is_repeated_given_up_or_final() -> None:
    busy = [DeliveryError("busy", wait_s=0.7), DeliveryError("busy")]
    outbox = letters(
        *(Letter("again", "1"), Letter("often", "2"), Letter("gone", "3"), Letter("well", "4")),
        again=[*busy],
        often=[*busy, DeliveryError("still busy")],
        gone=[DeliveryError("gone", final=True)],
    )
    await until_done(outbox, Policy(max_attempts=3, first_s=0.1, factor=2.0, jitter=0.0))
    assert outbox.dead == {"often": "still busy", "gone": "gone"}
    assert sorted(outbox.tried) == sorted(["again", "often"] * 3 + ["gone", "well"])
    assert sorted(outbox.pauses) == [0.2, 0.2, 0.7, 0.7]


@pytest.mark.parametrize(("most", "tried"), [(3, 3), (inf, 1)])
@on_loop
async def test_a_defect_costs_an_attempt_or_the_message(most: float, tried: int) -> None:
    outbox = letters(Letter("a"), a=[ZeroDivisionError() for _ in range(9)])
    await until_done(outbox, Policy(max_attempts=most, first_s=0.01))
    assert outbox.dead == {"a": "the server failed; its log says why"}
    assert len(outbox.tried) == tried


@on_loop
async def test_one_receiver_gets_few_at_once_and_delays_no_other() -> None:
    outbox = letters(*(Letter(f"{n}") for n in range(9)), Letter("other", "elsewhere"))
    running = asyncio.create_task(DeliveryLoop(outbox, Policy(to_one_host=2)).run())
    await eventually(lambda: "other" in outbox.tried)
    assert outbox.at_once == 3
    outbox.gate.set()
    await eventually(lambda: not outbox.waiting)
    await end([running])
    assert len(outbox.tried) == 10


@on_loop
async def test_the_whole_delivery_has_a_limit_of_its_own() -> None:
    outbox = letters(*(Letter(f"{n}", f"host {n}") for n in range(9)))
    running = asyncio.create_task(DeliveryLoop(outbox, Policy(at_once=4)).run())
    await eventually(lambda: outbox.at_once == 4)
    outbox.gate.set()
    await eventually(lambda: not outbox.waiting)
    await end([running])
    assert outbox.most_at_once == 4


@on_loop
async def test_with_one_at_once_a_receiver_gets_its_messages_in_order() -> None:
    outbox = letters(*(Letter(f"{n}") for n in range(5)), **{"0": [DeliveryError("busy")]})
    await until_done(outbox, Policy(first_s=0.0, to_one_host=1))
    assert outbox.tried == [*"001234"]


@on_loop
async def test_an_attempt_under_way_is_made_again_by_the_next_loop() -> None:
    outbox = letters(Letter("a"))
    running = asyncio.create_task(DeliveryLoop(outbox, Policy()).run())
    await eventually(lambda: outbox.at_once)
    await end([running])
    assert outbox.at_once == 0
    await until_done(outbox, Policy())
    assert outbox.tried == ["a", "a"]


@on_loop
async def test_a_store_that_is_unavailable_costs_no_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ndif.delivery.loop._RETRY_S", 0.01)
    outbox = letters(Letter("a"), a=[BrokerError("it is away")])
    await until_done(outbox, Policy(max_attempts=1))
    assert outbox.tried == ["a", "a"]
    assert "letter a may be made twice: it is away" in caplog.text
