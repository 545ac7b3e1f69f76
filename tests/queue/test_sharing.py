"""Requests that share a forward pass: selection, answers and individual reruns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ndif.queue.sharing import may_share
from ndif.schema.payload import PayloadFile
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from tests.on_loop import on_loop, on_virtual_loop
from tests.queue.test_processor import MODEL, Client, Gate, Line, Replica, a_line
from tests.waiting import virtual_time_passes as elapse

_MOST = 4
Answer = Callable[[Request], Response | None]


def with_others(request: Request) -> Response | None:
    return Response(request.id, Status.COMPLETED, "With others.")


@dataclass
class Passes:
    """Shared passes; `answer` returns each response, or None if the request must be rerun individually."""

    answer: Answer = with_others
    began: asyncio.Queue[list[str]] = field(default_factory=asyncio.Queue)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None


@asynccontextmanager
async def sharing(
    folder: Path, passes: Passes, gate: Gate, count: int = 1
) -> AsyncIterator[tuple[Line, Client]]:
    """A queue with `count` replicas, and a client whose request runs alone until the gate opens."""

    class Sharing(Replica):
        async def pass_of(self, requests: Sequence[Request]) -> list[Response | None]:
            passes.began.put_nowait([member.id for member in requests])
            ending = asyncio.ensure_future(passes.may_end.wait())
            cancelling = asyncio.ensure_future(self.cancelled.get())
            await asyncio.wait({ending, cancelling}, return_when=asyncio.FIRST_COMPLETED)
            if cancelling.done():
                return [None] * len(requests)
            cancelling.cancel()
            if passes.error is not None:
                raise passes.error
            return [passes.answer(member) for member in requests]

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.shared_passes = SimpleNamespace(most=_MOST, run=self.pass_of)

    async with a_line(folder, gate, kind=Sharing, count=count) as line:
        busy = await line.join("before")
        await gate.began.get()
        yield line, busy


async def ends(client: Client) -> str:
    return (await client.hears(Status.COMPLETED)).description


@on_loop
async def test_waiting_requests_share_pass(tmp_path: Path) -> None:
    passes, gate = Passes(), Gate()
    async with sharing(tmp_path, passes, gate) as (line, busy):
        clients = [await line.join(user, trusted=True) for user in "abcdef"]
        gate.let_end()
        assert await passes.began.get() == [client.request.id for client in clients[:_MOST]]
        assert len(line.processor.replicas.runs) == _MOST
        passes.may_end.set()
        assert await passes.began.get() == [client.request.id for client in clients[_MOST:]]
        assert [await ends(client) for client in clients] == ["With others."] * 6
        assert await ends(busy) == "Done."
        assert line.ran == [busy.request.id]
        # DISPATCHED is told once.
        assert clients[0].statuses == ["QUEUED", "DISPATCHED", "COMPLETED"]


@on_loop
async def test_single_waiting_request_runs_alone(tmp_path: Path) -> None:
    passes, gate = Passes(), Gate()
    async with sharing(tmp_path, passes, gate) as (line, _):
        client = await line.join("a", trusted=True)
        gate.let_end(2)
        assert await ends(client) == "Done."
        assert passes.began.empty()


@on_loop
async def test_shared_pass_keeps_queue_order(tmp_path: Path) -> None:
    """No request overtakes one that may not share a pass."""
    passes, gate = Passes(), Gate()
    passes.may_end.set()
    async with sharing(tmp_path, passes, gate) as (line, _):
        clients = [
            await line.join("a", trusted=True),
            await line.join("b", trusted=True),
            await line.join("c"),
            await line.join("d", trusted=True),
            await line.join("e", trusted=True, env={"attn_implementation": "eager"}),
        ]
        gate.let_end(4)
        assert [await ends(client) for client in clients] == [
            *["With others."] * 2,
            *["Done."] * 3,
        ]
        assert await passes.began.get() == [client.request.id for client in clients[:2]]
        assert line.ran[1:] == [client.request.id for client in clients[2:]]


@on_virtual_loop
async def test_request_unanswered_by_pass_is_rerun_individually(tmp_path: Path) -> None:
    gate = Gate()
    async with sharing(tmp_path, passes := Passes(), gate) as (line, _):
        clients = [await line.join(user, trusted=True) for user in "abc"]
        first, second, third = (client.request.id for client in clients)
        passes.answer = lambda member: with_others(member) if member.id == second else None
        passes.may_end.set()
        gate.let_end()
        assert await ends(clients[1]) == "With others."
        assert (await gate.began.get()).id in (first, third)
        await elapse(1)
        assert gate.began.empty()  # one after the other
        gate.let_end(2)
        assert [await ends(client) for client in (clients[0], clients[2])] == ["Done."] * 2
        assert sorted(line.ran[1:]) == sorted([first, third])
        assert clients[0].statuses == ["QUEUED", *["DISPATCHED"] * 2, "RUNNING", "COMPLETED"]


@on_loop
async def test_error_of_pass_fails_no_job(tmp_path: Path) -> None:
    passes, gate = Passes(error=ZeroDivisionError()), Gate()
    passes.may_end.set()
    async with sharing(tmp_path, passes, gate) as (line, _):
        clients = [await line.join(user, trusted=True) for user in "ab"]
        gate.let_end(3)
        assert [await ends(client) for client in clients] == ["Done."] * 2


@on_loop
async def test_departed_client_does_not_delay_pass(tmp_path: Path) -> None:
    passes, gate = Passes(), Gate()
    passes.may_end.set()
    async with sharing(tmp_path, passes, gate) as (line, _):
        clients = [await line.join(user, trusted=True) for user in "abc"]
        await clients[1].leave()
        gate.let_end()
        assert await passes.began.get() == [clients[at].request.id for at in (0, 2)]
        assert [await ends(clients[at]) for at in (0, 2)] == ["With others."] * 2


@on_loop
async def test_slow_client_does_not_delay_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears = asyncio.Event()
    passes, gate = Passes(), Gate()
    passes.may_end.set()
    async with sharing(tmp_path, passes, gate) as (line, _):
        clients = [await line.join(user, trusted=True) for user in "abc"]
        publish = line.broker.publish

        async def slowly(request: Request, response: Response) -> bool:
            if request.id == clients[0].request.id:
                await hears.wait()
            return await publish(request, response)

        monkeypatch.setattr(line.broker, "publish", slowly)
        gate.let_end()
        assert [await ends(clients[at]) for at in (1, 2)] == ["With others."] * 2
        hears.set()
        assert await ends(clients[0]) == "With others."


@on_loop
async def test_cancelled_request_leaves_pass_and_others_complete(
    tmp_path: Path,
) -> None:
    passes, gate = Passes(), Gate()
    async with sharing(tmp_path, passes, gate) as (line, _):
        clients = [await line.join(user, trusted=True) for user in "abc"]
        gate.let_end()
        await passes.began.get()
        assert await line.dispatcher.cancel(clients[1].request.id, "Not wanted.")
        assert (await clients[1].hears(Status.ERROR)).description == "Not wanted."
        passes.may_end.set()
        assert [await ends(clients[at]) for at in (0, 2)] == ["With others."] * 2


@on_virtual_loop
async def test_request_cancelled_before_individual_rerun_does_not_run(tmp_path: Path) -> None:
    passes, gate = Passes(answer=lambda _: None), Gate()
    passes.may_end.set()
    async with sharing(tmp_path, passes, gate) as (line, _):
        clients = {
            client.request.id: client
            for client in [await line.join(u, trusted=True) for u in "abc"]
        }
        gate.let_end()
        running = (await gate.began.get()).id
        first, second = (name for name in clients if name != running)
        assert await line.dispatcher.cancel(first, "Not wanted.")
        assert (await clients[first].hears(Status.ERROR)).description == "Not wanted."
        assert await line.dispatcher.cancel(running, "Nor this.")
        assert line.replicas[0].cancelled.get_nowait() == "Nor this."
        gate.let_end(2)
        assert await ends(clients[second]) == "Done."
        assert first not in line.ran


@on_loop
async def test_replica_lost_during_pass_does_not_count_as_attempt(tmp_path: Path) -> None:
    gate = Gate()
    async with sharing(tmp_path, passes := Passes(), gate) as (line, _):
        clients = [await line.join(user, trusted=True) for user in "ab"]
        gate.let_end()
        await passes.began.get()
        passes.error = line.replicas[0].lose()
        passes.may_end.set()
        gate.let_end(2)
        # Each request runs alone on another replica, as a first attempt.
        assert [await ends(client) for client in clients] == ["Done."] * 2
        assert passes.began.empty()
        assert len(line.replicas) == 2


@on_loop
async def test_request_unanswered_by_pass_is_rerun_on_any_replica(tmp_path: Path) -> None:
    passes, gate = Passes(answer=lambda _: None), Gate()
    passes.may_end.set()
    async with sharing(tmp_path, passes, gate, count=2) as (line, _):
        other = await line.join("other")
        await gate.began.get()
        clients = [await line.join(user, trusted=True) for user in "ab"]
        gate.let_end()
        first = (await gate.began.get()).id
        gate.let_end()  # the other replica's
        second = (await gate.began.get()).id
        assert {first, second} == {client.request.id for client in clients}
        gate.let_end(2)
        assert [await ends(client) for client in (*clients, other)] == ["Done."] * 3


@on_loop
async def test_shared_replica_counts_as_one_busy_replica(tmp_path: Path) -> None:
    passes, gate = Passes(), Gate()
    async with sharing(tmp_path, passes, gate) as (line, _):
        clients = [await line.join(user, trusted=True) for user in "abcd"]
        gate.let_end()
        await passes.began.get()
        line.processor.take_load_sample()
        assert line.processor.take_load_sample().running == 1
        assert len(line.processor.replicas.runs) == 4
        passes.may_end.set()
        for client in clients:
            await ends(client)


@on_virtual_loop
async def test_each_request_is_charged_its_share_of_pass(tmp_path: Path) -> None:
    passes, gate = Passes(), Gate()
    async with sharing(tmp_path, passes, gate) as (line, _):
        settled: list[float] = []
        charge = line.processor.queue.settle

        def settle(entry: Any, ran_s: float) -> None:
            settled.append(ran_s)
            charge(entry, ran_s)

        line.processor.queue.settle = settle  # type: ignore[method-assign]
        clients = [await line.join(user, trusted=True) for user in "abcd"]
        gate.let_end()
        await passes.began.get()
        await elapse(2)
        passes.may_end.set()
        for client in clients:
            await ends(client)
        assert settled[-4:] == pytest.approx([2 / 4] * 4)


def request(**fields: Any) -> Request:
    return Request(
        **{
            "model": MODEL,
            "generation": "0.8",
            "wire": Wire.ENVELOPE,
            "payload": b"",
            "compress": False,
            "base_url": "",
            "trusted": True,
            **fields,
        }
    )


def test_only_compatible_trusted_requests_can_share(tmp_path: Path) -> None:
    assert may_share(request(), request(key="another", user="bob"))
    assert not may_share(request(), request(trusted=False))
    assert not may_share(request(trusted=False), request(trusted=False))
    assert not may_share(request(), request(env={"peft": "a/b"}))
    assert not may_share(request(env={"peft": "a/b"}), request(env={"peft": "a/b"}))
    assert may_share(request(env={"a": 1}), request(env={"a": 1}))
    assert not may_share(request(env={"a": 1}), request(env={"a": 2}))
    assert not may_share(request(), request(payload=PayloadFile.create(tmp_path)))
