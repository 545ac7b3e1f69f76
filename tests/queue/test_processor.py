"""The queue of one model, with a real broker and store, and a scripted replica."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette

from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import MakeActor
from ndif.cluster.models import Models
from ndif.control import remote_leader
from ndif.control.control_plane import ControlPlane
from ndif.control.remote_leader import RemoteLeader, answer_call
from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.results import ResponseRoute
from ndif.host.evaluation import Measured
from ndif.host.execution import announce
from ndif.host.port import ActorError, EndedError, ReplicaLostError, ServedModel, SharedPasses
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.queue import dispatcher as dispatcher_module
from ndif.queue import lifecycle as queue_lifecycle
from ndif.queue import processor as processor_module
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor, QueuePolicy
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey
from ndif.schema.repositories import Repositories
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response, StoredResult
from ndif.schema.states import ProcessorStatus
from ndif.schema.status import Status
from ndif.stores.accounts import PROBER, Caller, FileAccounts
from ndif.stores.broker import Broker, MemoryBroker, Subscription
from ndif.stores.broker.redis import broker as broker_module
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.leader import LeaderRpc, SharedCache
from ndif.stores.objects import FileStore
from ndif.stores.objects.port import update_key
from ndif.stores.responder import Responder, StoredResponse, last_response
from ndif.tasks import end, within
from tests import frames
from tests.on_loop import on_loop, on_virtual_loop
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import PATIENCE_S, eventually, time_passes_async
from tests.waiting import virtual_time_passes as elapse

Respond = Callable[[Response], Awaitable[None]]
Act = Callable[["Replica", Request, Respond], Awaitable[Response]]

MODEL = ModelKey("a.B", "org/name")
NEVER_S = 3600.0
OFTEN_S = 0.02


@dataclass
class Replica:
    """A stand-in for `ModelActor`: its process is an event, and `act` runs each request."""

    act: Act
    reason: str | None
    """The reason why the replica does not start; None if it starts."""
    ran: list[str]
    may_start: asyncio.Event | None = None
    shared_passes: SharedPasses | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    model: ServedModel | None = None
    cancelled: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def start(self, progress: Callable[[int, int], None]) -> None:
        progress(3 << 30, 13 << 30)
        if self.may_start is not None:
            await self.may_start.wait()
        if self.reason is not None:
            raise ActorError(self.reason)

    async def stop(self) -> None:
        self.ended.set()

    async def to_cache(self) -> None:
        raise NotImplementedError

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        raise NotImplementedError

    async def run(self, request: Request, respond: Respond) -> Response:
        await announce(request, respond)
        self.ran.append(request.id)
        await respond(Response(request.id, Status.RUNNING))
        return await self.act(self, request, respond)

    def cancel(self, reason: str) -> None:
        self.cancelled.put_nowait(reason)

    def lose(self) -> ReplicaLostError:
        """End like a lost model process."""
        self.ended.set()
        return ReplicaLostError("the model process ended")


@dataclass
class Line:
    """A running processor with its broker, store and replicas."""

    dispatcher: Dispatcher
    processor: Processor
    broker: Broker
    store: FileStore
    replicas: list[Replica]
    ran: list[str]

    async def join(
        self,
        user: str = "",
        *,
        polled: bool = False,
        wire: Wire = Wire.ENVELOPE,
        key: str = "",
        trusted: bool = False,
        env: Mapping[str, Any] | None = None,
    ) -> Client:
        """Submit one request and return its client."""
        channel = None if polled else await self.broker.subscribe()
        request = Request(
            model=MODEL,
            generation="0.8",
            wire=wire,
            payload=b"opaque",
            compress=False,
            base_url="http://here",
            subscription_id=channel.id if channel else None,
            user=user,
            key=key,
            trusted=trusted,
            env=env or {},
        )
        await self.broker.submit(request)
        claimed = await self.broker.claim()
        await self.dispatcher.accept(claimed)
        return Client(request, channel, self.store, self.dispatcher)


@dataclass
class Client:
    request: Request
    channel: Subscription | None
    store: FileStore
    dispatcher: Dispatcher
    responses: list[Response] = field(default_factory=list)

    @property
    def statuses(self) -> list[str]:
        return [response.status.value for response in self.responses]

    async def hears(self, status: Status) -> Response:
        """Wait for the next update with that status."""
        assert self.channel is not None
        while True:
            response = frames.read(await self.channel.next())
            self.responses.append(response)
            if response.status is status:
                return response
            assert not response.status.terminal, response

    async def leave(self) -> None:
        assert self.channel is not None
        await self.channel.close()

    async def polls(self) -> dict[str, Any]:
        waiting = self.dispatcher.update_of(self.request.id)
        stored = await last_response(self.store, self.request.id)
        return {
            k: v for kept in (stored, waiting) if kept is not None for k, v in kept.fields.items()
        }


async def complete(replica: Replica, request: Request, respond: Respond) -> Response:
    return Response(request.id, Status.COMPLETED, "Done.")


@contextlib.asynccontextmanager
async def a_line(
    folder: Path,
    act: Act = complete,
    *,
    reasons: list[str] | None = None,
    may_start: asyncio.Event | None = None,
    update_interval_s: float = NEVER_S,
    store: FileStore | None = None,
    max_attempts: int = 2,
    count: int = 1,
    broker: Broker | None = None,
    kind: type[Replica] = Replica,
) -> AsyncIterator[Line]:
    """A queue whose replicas run `act`; `reasons` are the start errors of the first replicas."""
    broker, store = broker or MemoryBroker(), store or FileStore(folder, 3600)
    replicas: list[Replica] = []
    ran: list[str] = []

    def make(config: DeploymentConfig, generation: str, place: PlacedReplica) -> Replica:
        replicas.append(kind(act, reasons.pop(0) if reasons else None, ran, may_start))
        return replicas[-1]

    controller = await a_controller(make, replicas=count)
    (model,) = controller.models
    dispatcher = Dispatcher(
        controller, broker, Responder(broker, store), QueuePolicy(update_interval_s, max_attempts)
    )
    processor = dispatcher.processor(model, "0.8")
    try:
        yield Line(dispatcher, processor, broker, store, replicas, ran)
        assert processor.status is not ProcessorStatus.CANCELLED, "the line came to a halt"
    finally:
        await asyncio.wait_for(dispatcher.stop(), PATIENCE_S)
        await controller.stop()


async def a_controller(make: MakeActor, replicas: int = 1) -> Controller:
    """A controller of one model, on a machine with room for anything."""

    async def evaluate(config: DeploymentConfig, generation: str) -> Measured:
        return Measured(1)

    async def discover() -> list[Node]:
        return [Node("here", "here", Resources.of([], 1 << 40))]

    models = Models([DeploymentConfig("org/name", "org/name", replicas=replicas, dedicated=True)])
    controller = Controller(models, make, evaluate, discover)
    await controller.discover()
    return controller


@dataclass
class Gate:
    """An `act` that reports its begin, and ends when the test allows it."""

    began: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)
    may_end: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def __call__(self, replica: Replica, request: Request, respond: Respond) -> Response:
        await self.began.put(request)
        await self.may_end.acquire()
        return Response(request.id, Status.COMPLETED, "Done.")

    def let_end(self, count: int = 1) -> None:
        for _ in range(count):
            self.may_end.release()


def position(response: Response) -> int:
    match = re.fullmatch(
        r"Your job is number (\d+) in the queue for org/name\."
        r"( Estimated start: in [a-z0-9 ]+\.)?",
        response.description,
    )
    assert match, response
    return int(match[1])


# Several replicas


@on_virtual_loop
async def test_replicas_serve_one_queue_in_parallel(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate, count=2) as line:
        clients = [await line.join() for _ in range(4)]
        running = {(await gate.began.get()).id for _ in range(2)}
        assert running == {client.request.id for client in clients[:2]}
        await elapse(OFTEN_S)
        assert gate.began.empty()
        last = await line.join()
        # Two run, two wait.
        assert position(await last.hears(Status.QUEUED)) == 5
        gate.let_end()
        assert (await gate.began.get()).id == clients[2].request.id
        gate.let_end(4)
        for client in [*clients, last]:
            await client.hears(Status.COMPLETED)
        assert len(line.replicas) == 2


@on_loop
async def test_probe_waits_like_user_and_does_not_count_as_load(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        running = await line.join("ada")
        await gate.began.get()
        line.processor.take_load_sample()
        probe = await line.join(PROBER)
        assert position(await probe.hears(Status.QUEUED)) == 2
        assert line.processor.take_load_sample().waiting == 0
        user = await line.join("bob")
        assert line.processor.take_load_sample().waiting == 2
        gate.let_end(3)
        for client in (running, probe, user):
            await client.hears(Status.COMPLETED)


@on_loop
async def test_request_that_lost_its_replica_runs_on_another(tmp_path: Path) -> None:
    gate = Gate()
    lost: list[str] = []

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        response = await gate(replica, request, respond)
        if not lost:
            lost.append(request.id)
            raise replica.lose()
        return response

    may_start = asyncio.Event()
    may_start.set()
    async with a_line(tmp_path, act, count=2, may_start=may_start) as line:
        clients = [await line.join() for _ in range(2)]
        for _ in clients:
            await gate.began.get()
        may_start.clear()  # no other comes for the one that ends
        gate.let_end(2)
        again = await gate.began.get()
        assert again.id == lost[0]
        gate.let_end()
        for client in clients:
            await client.hears(Status.COMPLETED)
        assert line.processor.status is ProcessorStatus.READY
        assert line.ran.count(lost[0]) == 2


@on_virtual_loop
async def test_replica_that_fails_to_start_fails_no_request(tmp_path: Path) -> None:
    async with a_line(tmp_path, reasons=["it is broken"], count=2) as line:
        clients = [await line.join() for _ in range(5)]
        for client in clients:
            await client.hears(Status.COMPLETED)
        # The failed replica is not retried for a while.
        assert len(line.replicas) == 2


@on_loop
async def test_waiting_requests_fail_if_no_replica_loads(tmp_path: Path) -> None:
    async with a_line(tmp_path, reasons=["it is broken"] * 2, count=2) as line:
        clients = [await line.join() for _ in range(3)]
        for client in clients:
            assert "it is broken" in (await client.hears(Status.ERROR)).description
        assert line.processor.status is ProcessorStatus.UNINITIALIZED


@on_loop
async def test_job_is_cancelled_on_its_own_replica(tmp_path: Path) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        return Response(request.id, Status.ERROR, await replica.cancelled.get())

    async with a_line(tmp_path, act, count=3) as line:
        clients = [await line.join() for _ in range(3)]
        for client in clients:
            await client.hears(Status.RUNNING)
        for client in reversed(clients):
            assert await line.dispatcher.cancel(client.request.id, f"no {client.request.id}")
            response = await client.hears(Status.ERROR)
            assert response.description == f"no {client.request.id}"


# Normal operation


@on_loop
async def test_first_request_receives_every_status_in_order(tmp_path: Path) -> None:
    async with a_line(tmp_path) as line:
        client = await line.join()
        await client.hears(Status.COMPLETED)
    assert client.statuses == [
        "QUEUED",
        "PROVISIONING",
        "DEPLOYING",
        "DISPATCHED",
        "RUNNING",
        "COMPLETED",
    ]
    assert all(response.id == client.request.id for response in client.responses)
    assert "nnsight 0.8" in client.responses[2].description


@pytest.mark.parametrize("polled", [False, True])
@on_virtual_loop
async def test_client_receives_loading_progress(tmp_path: Path, polled: bool) -> None:
    may_start = asyncio.Event()
    async with a_line(tmp_path, may_start=may_start, update_interval_s=OFTEN_S) as line:
        line.processor.model.load_s["0.8"] = 21.0
        first = await line.join(polled=polled)
        await elapse(5 * OFTEN_S)
        late = await line.join(polled=polled)
        await elapse(5 * OFTEN_S)
        expected = (
            "The model is being loaded for nnsight 0.8: 3GiB of 13GiB are read (the last time it took "
            "21s). Your job is number {} in the queue for org/name."
        )
        if not polled:
            may_start.set()
        for number, client in enumerate((first, late), start=1):
            if polled:
                update = await client.polls()
                assert update["status"] == "DEPLOYING"
                assert update["description"] == expected.format(number)
                continue
            await client.hears(Status.DISPATCHED)
            states = client.statuses[:-1]
            assert states == sorted(states, key=["QUEUED", "PROVISIONING", "DEPLOYING"].index)
            assert client.responses[-2].description == expected.format(number)
        may_start.set()


@on_loop
async def test_ready_replica_skips_deploying_status(tmp_path: Path) -> None:
    async with a_line(tmp_path) as line:
        await (await line.join()).hears(Status.COMPLETED)
        client = await line.join()
        await client.hears(Status.COMPLETED)
        assert client.statuses == ["QUEUED", "DISPATCHED", "RUNNING", "COMPLETED"]
        assert len(line.replicas) == 1


@on_virtual_loop
async def test_requests_run_one_at_a_time_in_order(tmp_path: Path) -> None:
    at_once = most = 0

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await elapse(0.001)
        at_once -= 1
        return await complete(replica, request, respond)

    async with a_line(tmp_path, act) as line:
        clients = [await line.join() for _ in range(12)]
        for client in clients:
            await client.hears(Status.COMPLETED)
        assert line.ran == [client.request.id for client in clients]
        assert most == 1


@on_loop
async def test_processor_serves_users_fairly(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        flood = [await line.join("busy") for _ in range(50)]
        await gate.began.get()
        other = await line.join("other")
        # One runs, one of the same user is next at most.
        assert position(await other.hears(Status.QUEUED)) <= 3
        gate.let_end(51)
        await other.hears(Status.COMPLETED)
        assert line.ran.index(other.request.id) <= 2
        for client in flood:
            await client.hears(Status.COMPLETED)
        # The requests of one user stay in order.
        assert [r for r in line.ran if r != other.request.id] == [c.request.id for c in flood]


@on_virtual_loop
async def test_long_runs_are_charged_to_their_user(tmp_path: Path) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        await elapse(0.05 if request.user == "long" else 0.005)
        return await complete(replica, request, respond)

    async with a_line(tmp_path, act) as line:
        clients = [await line.join(user) for _ in range(12) for user in ("long", "short")]
        for client in clients:
            await client.hears(Status.COMPLETED)
        users = {client.request.id: client.request.user for client in clients}
        order = [users[request] for request in line.ran]
        # The runs of "long" take ten times as long, so the jobs of "short" finish long before.
        assert order[:16].count("short") >= 9


@on_virtual_loop
async def test_wait_is_estimated_once_run_times_are_known(tmp_path: Path) -> None:
    gate = Gate()

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if request.id in slow:
            await elapse(1.5)
            return await complete(replica, request, respond)
        return await gate(replica, request, respond)

    slow: set[str] = set()
    async with a_line(tmp_path, act) as line:
        first = await line.join()
        heard = await first.hears(Status.QUEUED)
        assert "Estimated" not in heard.description  # nothing is known yet
        slow.add(first.request.id)
        await first.hears(Status.COMPLETED)
        await line.join()
        await gate.began.get()
        for _ in range(6):
            last = await line.join()
        description = (await last.hears(Status.QUEUED)).description
        match = re.search(r"Estimated start: in about (\d+) seconds\.", description)
        assert match, description
        # Six jobs of a second and a half are ahead; one of them has begun.
        assert 5 <= int(match[1]) <= 12
        gate.let_end(8)
        await last.hears(Status.COMPLETED)


@on_loop
async def test_each_client_receives_its_position(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        first = await line.join()
        assert position(await first.hears(Status.QUEUED)) == 1
        await gate.began.get()
        # The running job counts: two jobs are ahead of the third.
        for expected in (2, 3, 4):
            client = await line.join()
            assert position(await client.hears(Status.QUEUED)) == expected


@on_virtual_loop
async def test_waiting_clients_receive_position_updates(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate, update_interval_s=OFTEN_S) as line:
        first, second, third = [await line.join() for _ in range(3)]
        await gate.began.get()
        heard = [position(await third.hears(Status.QUEUED))]
        gate.let_end()
        await first.hears(Status.COMPLETED)
        await gate.began.get()
        while heard[-1] != 2:
            heard.append(position(await third.hears(Status.QUEUED)))
        assert heard == sorted(heard, reverse=True)
        assert heard[0] == 3
        gate.let_end(2)
        await second.hears(Status.COMPLETED)
        await third.hears(Status.COMPLETED)


@pytest.mark.parametrize(
    ("took_s", "pause_s"), [(0.0, 3.0), (0.29, 3.0), (1.5, 15.0), (600.0, 60.0)]
)
def test_long_queue_is_updated_less_often(took_s: float, pause_s: float) -> None:
    """Otherwise updates for 10,000 clients would take a third of the server's time."""
    assert QueuePolicy(update_interval_s=3.0).update_pause_s(took_s) == pytest.approx(pause_s)


@on_virtual_loop
async def test_no_update_follows_final_response(tmp_path: Path) -> None:
    async with a_line(tmp_path, update_interval_s=OFTEN_S) as line:
        client = await line.join()
        await client.hears(Status.COMPLETED)
        following = asyncio.create_task(client.hears(Status.COMPLETED))
        await (await line.join()).hears(Status.COMPLETED)
        await elapse(5 * OFTEN_S)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert client.statuses[-1] == "COMPLETED"
        assert client.statuses.count("COMPLETED") == 1


@on_loop
async def test_logs_and_streams_reach_client_before_final_response(tmp_path: Path) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        await respond(Response(request.id, Status.LOG, "printed"))
        await respond(Response(request.id, Status.STREAM, data=b"streamed"))
        return Response(request.id, Status.ERROR, "ZeroDivisionError", meta={"peak_memory": 1})

    async with a_line(tmp_path, act) as line:
        # Only the header wire carries streams, and only the envelope wire carries `meta`.
        for wire, streamed, meta in (
            (Wire.ENVELOPE, None, {"peak_memory": 1}),
            (Wire.HEADERS, b"streamed", None),
        ):
            client = await line.join(wire=wire)
            last = await client.hears(Status.ERROR)
            assert client.statuses[-4:] == ["RUNNING", "LOG", "STREAM", "ERROR"]
            assert client.responses[-2].data == streamed
            assert (last.description, last.meta) == ("ZeroDivisionError", meta)


# Jobs that are polled


@on_loop
async def test_polled_job_has_current_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_module, "_COUNT_SHARE", math.inf)  # count again for each call
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        first, second = [await line.join(polled=True) for _ in range(2)]
        await gate.began.get()
        assert (await first.polls())["status"] == "RUNNING"
        waiting = await second.polls()
        assert (waiting["id"], waiting["status"]) == (second.request.id, "QUEUED")
        third = await line.join(polled=True)
        for expected, client in ((2, second), (3, third)):
            description = (await client.polls())["description"]
            assert description == f"Your job is number {expected} in the queue for org/name."
        gate.let_end(3)
        await gate.began.get()
        assert (await first.polls())["status"] == "COMPLETED"


@on_loop
async def test_job_with_expired_response_still_belongs_to_its_user(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n- {key: a-key-of-ada, user: ada}\n- {key: a-key-of-bob, user: bob}\n")
    accounts, gate = FileAccounts(keys), Gate()
    ada = await accounts.account(Caller("a-key-of-ada"))
    async with a_line(tmp_path, gate) as line:

        async def update_of(request_id: str, stored: Status | None) -> StoredResponse | None:
            return line.dispatcher.update_of(request_id, is_stored=stored is not None)

        app = Starlette(
            routes=ResponseRoute(line.store, update_of, accounts).routes(),
            exception_handlers=EXCEPTION_HANDLERS,
        )
        clients = [await line.join(ada.user, polled=True, key=ada.key) for _ in range(2)]
        await gate.began.get()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            for client, status in zip(clients, ("RUNNING", "QUEUED"), strict=True):
                await line.store.delete(update_key(client.request.id))
                url = f"http://here/response/{client.request.id}"
                mine = await http.get(url, headers={"ndif-api-key": "a-key-of-ada"})
                assert (mine.status_code, mine.json().get("status")) == (200, status)
                assert "user" not in mine.json()
                others = await http.get(url, headers={"ndif-api-key": "a-key-of-bob"})
                assert others.status_code == 403
        gate.let_end(2)


@on_loop
async def test_long_queue_of_polled_jobs_does_not_block_event_loop(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate, update_interval_s=OFTEN_S) as line:
        clients = [await line.join(polled=True) for _ in range(2000)]
        await gate.began.get()
        delays, over = [], time.monotonic() + 1
        while time.monotonic() < over:
            # Measure the time of this thread: other programs may delay it, too.
            began = time.thread_time()
            await asyncio.sleep(0)
            delays.append(time.thread_time() - began)
            await clients[len(delays) % 2000].polls()
        assert sorted(delays)[int(len(delays) * 0.99)] < 0.05
        assert sorted(delays)[-1] < 0.5, "somebody was held up"
        assert (await clients[-1].polls())["description"].startswith("Your job is number 2000 ")
        # Nothing was stored for waiting jobs.
        assert len([*(tmp_path / "responses").iterdir()]) == 1


@on_loop
async def test_log_does_not_replace_status_of_polled_job(tmp_path: Path) -> None:
    logged, may_end = asyncio.Event(), asyncio.Event()

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        await respond(Response(request.id, Status.LOG, "printed"))
        logged.set()
        await may_end.wait()
        stored = StoredResult("http://here/results/x", 12)
        return Response(request.id, Status.COMPLETED, "Done.", stored, {"peak_memory": 1})

    async with a_line(tmp_path, act) as line:
        client = await line.join(polled=True)
        await logged.wait()
        assert (await client.polls())["status"] == "RUNNING"
        may_end.set()
        await (await line.join()).hears(Status.COMPLETED)
        assert await client.polls() == {
            "id": client.request.id,
            "status": "COMPLETED",
            "description": "Done.",
            "data": "http://here/results/x",
            "meta": {"peak_memory": 1},
        }


class SlowStore(FileStore):
    """A store that is slow to store a position, as over a network."""

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        if b"QUEUED" in content:
            await elapse(10 * OFTEN_S)
        await super().put(key, content)


@on_virtual_loop
async def test_late_position_update_does_not_replace_end_of_job(tmp_path: Path) -> None:
    gate, store = Gate(), SlowStore(tmp_path, 3600)
    async with a_line(tmp_path, gate, store=store, update_interval_s=OFTEN_S) as line:
        clients = [await line.join(polled=True) for _ in range(3)]
        await gate.began.get()
        telling = asyncio.create_task(line.dispatcher.notify_waiting("The cluster is away."))
        # Waiting clients are being notified; all jobs end before the notice is stored.
        await asyncio.sleep(0)
        gate.let_end(4)
        await (await line.join()).hears(Status.COMPLETED)
        await elapse(40 * OFTEN_S)
        await telling
        assert [(await client.polls())["status"] for client in clients] == ["COMPLETED"] * 3


class HeldStore(FileStore):
    """A store that blocks updates of the status QUEUED until the test allows them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NEVER_S)
        self.holds, self.may_answer = asyncio.Event(), asyncio.Event()

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        if b"QUEUED" in content:
            self.holds.set()
            await self.may_answer.wait()
        await super().put(key, content)


@on_virtual_loop
async def test_job_cancelled_during_slow_store_write_leaves_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatcher_module, "_ENDED_WITHIN_S", OFTEN_S)

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if len(line.replicas) == 1:
            raise replica.lose()
        return await complete(replica, request, respond)

    store = HeldStore(tmp_path)
    async with a_line(tmp_path, act, store=store) as line:
        client = await line.join(polled=True)
        await store.holds.wait()
        cancelling = asyncio.create_task(line.dispatcher.cancel(client.request.id, "Killed."))
        await elapse(10 * OFTEN_S)
        store.may_answer.set()
        assert await cancelling
        assert (await client.polls())["description"] == "Killed."
        await (await line.join()).hears(Status.COMPLETED)
        assert line.ran.count(client.request.id) == 1
        assert "could not be brought to its end" not in caplog.text


# Replicas that end


@on_loop
async def test_request_that_lost_its_replica_is_rerun_first(
    tmp_path: Path,
) -> None:
    gate = Gate()

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        response = await gate(replica, request, respond)
        if len(line.replicas) == 1:
            raise replica.lose()
        return response

    async with a_line(tmp_path, act) as line:
        first = await line.join()
        await gate.began.get()
        second = await line.join()
        gate.let_end(3)
        await first.hears(Status.COMPLETED)
        await second.hears(Status.COMPLETED)
        assert line.ran == [first.request.id, first.request.id, second.request.id]
        assert len(line.replicas) == 2
        # Both clients see their job wait for the second replica.
        assert first.statuses.count("DEPLOYING") == 2
        assert second.statuses.count("DEPLOYING") == 1


@pytest.mark.parametrize("polled", [True, False])
@on_virtual_loop
async def test_completed_request_is_not_rerun_after_loss_of_its_replica(
    tmp_path: Path, polled: bool
) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        response = await complete(replica, request, respond)
        if request.id == first.request.id:
            # A remote replica delivers its own responses.
            await respond(response)
            raise replica.lose()
        return response

    async with a_line(tmp_path, act, max_attempts=1) as line:
        first = await line.join(polled=polled)
        second = await line.join()
        await second.hears(Status.COMPLETED)
        assert line.ran == [first.request.id, second.request.id]
        assert await line.broker.is_complete(first.request)
        if polled:
            assert (await first.polls())["status"] == "COMPLETED"
        else:
            await first.hears(Status.COMPLETED)
            with pytest.raises(asyncio.TimeoutError):
                await within(first.hears(Status.ERROR), 0.05)


@pytest.mark.parametrize("first", ["nobody", "the replica", "the line"])
@on_virtual_loop
async def test_request_that_ended_elsewhere_keeps_its_end(tmp_path: Path, first: str) -> None:
    """If a waiting status was stored since, its end is unknown, and the request fails."""

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if request.id != ended.request.id:
            return await complete(replica, request, respond)
        if first == "the replica":
            response = Response(request.id, Status.COMPLETED, "Done.")
            await Responder(line.broker, line.store).respond(request, response)
        raise EndedError

    async with a_line(tmp_path, act) as line:
        ended = await line.join(polled=first != "nobody")
        other = await line.join()
        await other.hears(Status.COMPLETED)
        if first == "nobody":
            with pytest.raises(asyncio.TimeoutError):
                await within(ended.hears(Status.COMPLETED), 0.05)
        elif first == "the replica":
            assert (await ended.polls())["status"] == "COMPLETED"
        else:
            fields = await ended.polls()
            assert (fields["status"], "Send it again." in fields["description"]) == ("ERROR", True)


@on_loop
async def test_request_that_loses_every_replica_fails(tmp_path: Path) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if request.id == deadly.request.id:
            raise replica.lose()
        return await complete(replica, request, respond)

    async with a_line(tmp_path, act) as line:
        deadly, harmless = await line.join(), await line.join()
        error = await deadly.hears(Status.ERROR)
        assert "lost 2 times" in error.description
        assert error.description.endswith(".")
        await harmless.hears(Status.COMPLETED)
        assert line.ran == [deadly.request.id] * 2 + [harmless.request.id]
        assert len(line.replicas) == 3


@pytest.mark.parametrize(("attempts", "expected"), [(1, "lost once"), (3, "lost 3 times")])
@on_loop
async def test_operator_sets_number_of_attempts(
    tmp_path: Path, attempts: int, expected: str
) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        raise replica.lose()

    async with a_line(tmp_path, act, max_attempts=attempts) as line:
        client = await line.join()
        assert expected in (await client.hears(Status.ERROR)).description
        assert line.ran == [client.request.id] * attempts


@contextlib.asynccontextmanager
async def on_redis(redis: RedisServer, folder: Path) -> AsyncIterator[RedisBroker]:
    broker = RedisBroker(redis.url, FileStore(folder, 3600), SIGNER, inline_bytes=1 << 20)
    await broker.client.flushall()
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


async def ends(client: Client) -> dict[str, Any]:
    async def ended() -> dict[str, Any] | None:
        fields = await client.polls()
        return fields if Status(fields["status"]).terminal else None

    return await eventually(ended)


@pytest.mark.engine
@on_loop
async def test_jobs_wait_for_unavailable_broker(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_UPDATE_S", 0.1)

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if not began.is_set():
            began.set()
            await may_end.wait()
        payload = await line.broker.payload(replace(request, payload=b""))
        return Response(request.id, Status.COMPLETED, bytes(payload).decode())

    began, may_end = asyncio.Event(), asyncio.Event()
    async with on_redis(redis, tmp_path) as broker, a_line(tmp_path, act, broker=broker) as line:
        # When the broker ends, one job has not read its payload yet, and the others wait.
        clients = [await line.join(polled=True) for _ in range(4)]
        await began.wait()
        redis.kill()
        may_end.set()
        await time_passes_async(1.0)  # many updates of the broker's are due
        assert {(await client.polls())["status"] for client in clients}.isdisjoint(
            {"ERROR", "COMPLETED"}
        )
        redis.start()
        for client in clients:
            assert (await ends(client))["description"] == "opaque"
        assert [*dict.fromkeys(line.ran)] == [client.request.id for client in clients]
        assert len(line.replicas) == 1
        await eventually(lambda: redis.command("xlen", "queue") == "0")


@pytest.mark.engine
@on_loop
async def test_gateways_get_position_of_polled_job_from_leader(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_leader, "_CALL_TIMEOUT_S", OFTEN_S)
    gate, unknown = Gate(), str(uuid.uuid4())
    async with on_redis(redis, tmp_path) as broker, a_line(tmp_path, gate, broker=broker) as line:
        rpc, cache = LeaderRpc(broker.client, SIGNER), SharedCache(broker.client, SIGNER)
        asks = RemoteLeader(rpc, cache, broker, Repositories(), timeout_s=60, stop=lambda: None)
        first, second = [await line.join(polled=True) for _ in range(2)]
        await gate.began.get()
        assert await asks.update_of(second.request.id, Status.RECEIVED) is None, "nobody leads"
        monkeypatch.setattr(remote_leader, "_CALL_TIMEOUT_S", PATIENCE_S)
        control = cast(ControlPlane, SimpleNamespace(dispatcher=line.dispatcher))
        serving = asyncio.create_task(
            LeaderRpc(broker.client, SIGNER).serve(partial(answer_call, control))
        )
        update = await asks.update_of(second.request.id, Status.RECEIVED)
        assert update == line.dispatcher.update_of(second.request.id)
        assert update is not None
        assert update.fields["description"] == "Your job is number 2 in the queue for org/name."
        assert await asks.update_of(first.request.id, Status.RUNNING) is None
        update = await asks.update_of(first.request.id, None)  # its update has expired
        assert update is not None
        assert update.status is Status.RUNNING  # as that wire has it
        assert await asks.update_of(unknown, None) is None
        # This request was accepted, but Redis lost it before a leader claimed it.
        lost = await asks.update_of(unknown, Status.RECEIVED)
        assert lost is not None
        assert lost.status is Status.ERROR
        redis.command("flushall")
        for client, status in ((first, Status.RUNNING), (second, Status.RECEIVED)):
            update = await asks.update_of(client.request.id, status)
            assert update is None or update.status is Status.QUEUED, "the leader has it"
        gate.let_end(2)
        await ends(second)
        await end([serving])


@pytest.mark.engine
@on_loop
async def test_job_fails_if_broker_lost_its_payload(tmp_path: Path, redis: RedisServer) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if began.is_set():
            await line.broker.payload(replace(request, payload=b""))
        began.set()
        await may_end.wait()
        return Response(request.id, Status.COMPLETED)

    began, may_end, clients = asyncio.Event(), asyncio.Event(), list[Client]()
    async with on_redis(redis, tmp_path) as broker, a_line(tmp_path, act, broker=broker) as line:
        clients += [await line.join(polled=True) for _ in range(2)]
        await began.wait()
        redis.command("flushall")
        may_end.set()
        assert (await ends(clients[0]))["status"] == "COMPLETED"
        assert "send it again" in (await ends(clients[1]))["description"]


@on_loop
async def test_lost_replica_does_not_count_against_next_request(tmp_path: Path) -> None:
    lost: set[str] = set()

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if request.id not in lost:
            lost.add(request.id)
            raise replica.lose()
        return await complete(replica, request, respond)

    async with a_line(tmp_path, act) as line:
        for client in [await line.join() for _ in range(3)]:
            await client.hears(Status.COMPLETED)
        assert len(line.ran) == 6


@on_loop
async def test_waiting_requests_fail_if_model_cannot_be_loaded(tmp_path: Path) -> None:
    async with a_line(tmp_path, reasons=["the checkpoint is corrupt"]) as line:
        clients = [await line.join() for _ in range(3)]
        polling = await line.join(polled=True)
        for client in clients:
            error = await client.hears(Status.ERROR)
            assert "'org/name' could not be loaded for nnsight 0.8" in error.description
            assert "the checkpoint is corrupt" in error.description
        assert (await polling.polls())["status"] == "ERROR"
        assert line.ran == []
        # The next request loads the model again.
        await (await line.join()).hears(Status.COMPLETED)
        assert len(line.replicas) == 2


@on_loop
async def test_request_that_lost_its_replica_fails_if_no_other_starts(
    tmp_path: Path,
) -> None:
    reasons: list[str] = []

    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        reasons.append("no memory left")
        raise replica.lose()

    async with a_line(tmp_path, act, reasons=reasons) as line:
        client = await line.join()
        assert "no memory left" in (await client.hears(Status.ERROR)).description


@on_loop
async def test_internal_error_fails_only_one_request(tmp_path: Path) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if len(line.ran) == 1:
            raise KeyError("a secret of ours")
        return await complete(replica, request, respond)

    async with a_line(tmp_path, act) as line:
        unlucky, lucky = await line.join(), await line.join()
        error = await unlucky.hears(Status.ERROR)
        assert "secret" not in error.description
        assert "KeyError" not in error.description
        await lucky.hears(Status.COMPLETED)
        assert len(line.replicas) == 1


# Clients that leave, and jobs that are cancelled


@on_virtual_loop
async def test_request_of_departed_client_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_lifecycle, "_CHECK_S", OFTEN_S)
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        first, departed, third = [await line.join() for _ in range(3)]
        await gate.began.get()
        await departed.leave()
        gate.let_end(3)
        await first.hears(Status.COMPLETED)
        await third.hears(Status.COMPLETED)
        assert line.ran == [first.request.id, third.request.id]
        assert all(replica.cancelled.empty() for replica in line.replicas)
        assert not await line.broker.is_complete(departed.request), "it may be back in a moment"
        await eventually(lambda: line.broker.is_complete(departed.request))


@on_virtual_loop
async def test_disconnected_clients_leave_queue(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        running = await line.join()
        await gate.began.get()
        waiting = await line.join()
        for client in [await line.join() for _ in range(40)]:
            await client.leave()
        await elapse(OFTEN_S)
        last = await line.join()
        assert position(await last.hears(Status.QUEUED)) == 3
        gate.let_end(3)
        for client in (running, waiting, last):
            await client.hears(Status.COMPLETED)
        assert len(line.ran) == 3


@on_virtual_loop
async def test_job_of_disconnected_client_is_cancelled(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        first, away, third = [await line.join() for _ in range(3)]
        assert away.channel is not None
        await gate.began.get()
        await away.leave()
        gate.let_end()
        await gate.began.get()  # the third runs: the second has left the line
        cancelling = asyncio.create_task(line.dispatcher.cancel(away.request.id, "Killed."))
        await asyncio.sleep(0)
        away.channel = await line.broker.subscribe(away.channel.id)
        gate.let_end()
        await third.hears(Status.COMPLETED)
        assert await cancelling
        assert (await away.hears(Status.ERROR)).description == "Killed."
        assert line.ran == [first.request.id, third.request.id]


@on_virtual_loop
async def test_briefly_disconnected_client_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's gateway lost the connection to the broker."""
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        first, away, third = [await line.join() for _ in range(3)]
        publish, unheard = line.broker.publish, [away.request.id]

        async def publish_or_not(request: Request, response: Response) -> bool:
            if response.status is Status.DISPATCHED and request.id in unheard:
                unheard.remove(request.id)
                return False
            return await publish(request, response)

        monkeypatch.setattr(line.broker, "publish", publish_or_not)
        gate.let_end(3)
        for client in (first, third, away):
            await client.hears(Status.COMPLETED)
        assert not unheard
        assert sorted(line.ran) == sorted(client.request.id for client in (first, away, third))


@on_loop
async def test_running_job_is_cancelled_when_its_client_leaves(tmp_path: Path) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        if request.id == departed.request.id:
            began.set()
            return Response(request.id, Status.ERROR, await replica.cancelled.get())
        return await complete(replica, request, respond)

    began = asyncio.Event()
    async with a_line(tmp_path, act) as line:
        departed, waiting = await line.join(), await line.join()
        await began.wait()
        await departed.leave()
        await waiting.hears(Status.COMPLETED)
        assert line.ran == [departed.request.id, waiting.request.id]


@on_virtual_loop
async def test_leaving_after_end_does_not_cancel_another_job(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        first, second = await line.join(), await line.join()
        gate.let_end()
        await first.hears(Status.COMPLETED)
        await gate.began.get()
        await gate.began.get()
        await first.leave()
        await elapse(OFTEN_S)
        assert line.replicas[0].cancelled.empty()
        gate.let_end()
        await second.hears(Status.COMPLETED)


@on_loop
async def test_waiting_and_running_jobs_are_cancelled(tmp_path: Path) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        began.set()
        return Response(request.id, Status.ERROR, await replica.cancelled.get())

    began = asyncio.Event()
    async with a_line(tmp_path, act) as line:
        running, waiting = await line.join(), await line.join()
        await began.wait()
        assert await line.dispatcher.cancel(waiting.request.id, "Changed my mind.")
        assert (await waiting.hears(Status.ERROR)).description == "Changed my mind."
        assert await line.dispatcher.cancel(running.request.id, "Not this one either.")
        assert (await running.hears(Status.ERROR)).description == "Not this one either."
        for unknown in (waiting.request.id, "no such job", ""):
            assert not await line.dispatcher.cancel(unknown, "Why?")
        assert line.ran == [running.request.id]


@on_virtual_loop
async def test_cancelled_job_ends_although_its_replica_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "_ENDED_WITHIN_S", OFTEN_S)
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        live, polling = await line.join(), await line.join(polled=True)
        for client in (live, polling):
            assert await gate.began.get() == client.request
            assert await line.dispatcher.cancel(client.request.id, "Killed.")
            assert await line.broker.is_complete(client.request)
            assert not await line.dispatcher.cancel(client.request.id, "Killed again.")
            # A later answer of the replica is dropped.
            gate.let_end()
        await (await line.join()).hears(Status.QUEUED)
        assert (await live.hears(Status.ERROR)).description == "Killed."
        assert (await polling.polls())["description"] == "Killed."


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.ERROR])
@on_loop
async def test_job_that_ends_during_cancellation_is_not_cancelled(
    tmp_path: Path, status: Status
) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        began.set()
        await replica.cancelled.get()  # by then it has its end
        return Response(request.id, status, "By itself.")

    began = asyncio.Event()
    async with a_line(tmp_path, act) as line:
        client = await line.join()
        await began.wait()
        assert not await line.dispatcher.cancel(client.request.id, "Killed.")
        assert (await client.hears(status)).description == "By itself."


@on_virtual_loop
async def test_job_is_cancelled_while_its_model_loads(tmp_path: Path) -> None:
    may_start = asyncio.Event()
    async with a_line(tmp_path, may_start=may_start) as line:
        client = await line.join()
        await client.hears(Status.DEPLOYING)
        assert await line.dispatcher.cancel(client.request.id, "Changed my mind.")
        await client.hears(Status.ERROR)
        may_start.set()
        await elapse(OFTEN_S)
        await (await line.join()).hears(Status.COMPLETED)
        assert client.request.id not in line.ran


# The processor itself


@on_virtual_loop
async def test_processor_reports_its_status(tmp_path: Path) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        assert line.processor.status is ProcessorStatus.UNINITIALIZED
        client = await line.join()
        await gate.began.get()
        assert line.processor.status is ProcessorStatus.BUSY
        gate.let_end()
        await client.hears(Status.COMPLETED)
        await elapse(OFTEN_S)
        assert line.processor.status is ProcessorStatus.READY
    assert line.processor.status is ProcessorStatus.CANCELLED


@on_virtual_loop
async def test_processor_without_replica_is_uninitialized(tmp_path: Path) -> None:
    async def act(replica: Replica, request: Request, respond: Respond) -> Response:
        raise replica.lose()

    async with a_line(tmp_path, act) as line:
        client = await line.join()
        await client.hears(Status.ERROR)
        await elapse(OFTEN_S)
        assert line.processor.status is ProcessorStatus.UNINITIALIZED


@pytest.mark.parametrize("turns", range(12))
@on_loop
async def test_processor_stops_while_job_ends(tmp_path: Path, turns: int) -> None:
    gate = Gate()
    async with a_line(tmp_path, gate) as line:
        client = await line.join()
        await gate.began.get()
        gate.let_end()
        for _ in range(turns):
            await asyncio.sleep(0)
        # Leaving the context cancels the processor and waits for it.
    assert line.processor.status is ProcessorStatus.CANCELLED
    assert client.request.id in line.ran


# The dispatcher


@on_loop
async def test_each_generation_has_its_own_queue(tmp_path: Path) -> None:
    gate = Gate()

    def make(config: DeploymentConfig, generation: str, place: PlacedReplica) -> Replica:
        return Replica(gate if generation == "0.8" else complete, None, [])

    broker, store = MemoryBroker(), FileStore(tmp_path, 3600)
    controller = await a_controller(make)
    dispatcher = Dispatcher(controller, broker, Responder(broker, store))
    dispatcher.start()
    try:
        channel = await broker.subscribe()
        requests = [
            Request(MODEL, generation, Wire.ENVELOPE, b"", False, "", subscription_id=channel.id)
            for generation in ("0.8", "0.7", "0.8")
        ]
        for request in requests:
            await broker.submit(request)
        assert await gate.began.get() == requests[0]
        # The first request blocks its own queue only.
        ended = Client(requests[1], channel, store, dispatcher)
        assert (await ended.hears(Status.COMPLETED)).id == requests[1].id
        assert gate.began.empty()
        generations = sorted(variant.generation for variant in dispatcher.processors)
        assert generations == ["0.7", "0.8"]
    finally:
        await dispatcher.stop()
        await controller.stop()
    assert {processor.status for processor in dispatcher.processors.values()} == {
        ProcessorStatus.CANCELLED
    }
