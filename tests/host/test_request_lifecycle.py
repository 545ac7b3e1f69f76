"""The life of a request: its table of transitions, and every order of events over both brokers.

`Lives` simulates a server one event at a time: requests arrive, run, end, are cancelled and lose replicas;
clients leave and come back; leaders crash, hand over, or continue beside their successor. Afterwards all
running requests may finish, and each request must have had exactly one end.

The queue, its controller and both brokers are real. With Redis the replicas outlive their leaders and are
reached as Ray carries them, over real job channels; only the calls through Ray are calls in this process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import shutil
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from ray.exceptions import RayActorError

from ndif.cluster import remote_actor
from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import OrphanReplica
from ndif.cluster.models import Models
from ndif.cluster.ray import actors
from ndif.cluster.ray.actors import RayModelActor
from ndif.cluster.remote_actor import NodeServices, RemoteActor
from ndif.host.device_errors import DeviceFailure
from ndif.host.evaluation import Measured
from ndif.host.execution import announce
from ndif.host.job import (
    TRANSITIONS,
    WAITING,
    Component,
    IllegalTransitionError,
    JobEvent,
    Stored,
    next_state,
)
from ndif.host.port import Progress, ReplicaEvictedError, ReplicaLostError, Respond, ServedModel
from ndif.placement.demand import PlacementRules
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.queue import lifecycle as queue_lifecycle
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.lifecycle import QueueLifecycle
from ndif.queue.processor import QueuePolicy
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.states import DeploymentLevel
from ndif.schema.status import Status
from ndif.simulation.virtual_time import VirtualLoop
from ndif.stores.broker import Broker, MemoryBroker, Subscription
from ndif.stores.broker.redis import broker as redis_broker
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.redis.job_channels import JobReceiver, JobSender
from ndif.stores.broker.spool import Spool
from ndif.stores.objects import FileStore
from ndif.stores.responder import Responder, last_response
from ndif.tasks import end
from tests import frames
from tests.fuzzing import examples
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import eventually

CONFIG = DeploymentConfig("org/name", "org/name", replicas=2, dedicated=True)
REPLICAS = 2
BRIEFLY_S = 0.02

# The table


def reachable(by: frozenset[Component]) -> set[Status | None]:
    statuses: set[Status | None] = {None}
    while True:
        further = {
            t.target for t in TRANSITIONS.values() if t.sources & statuses and t.by & by
        } - statuses
        if not further:
            return statuses
        statuses |= further


def test_every_state_is_reachable_and_queue_can_end_every_live_state() -> None:
    assert reachable(frozenset(Component)) == {*Status, None} - {Status.LOG, Status.STREAM}
    for state in reachable(frozenset(Component)) - {None, Status.RECEIVED}:
        assert state is not None
        following = [t for t in TRANSITIONS.values() if state in t.sources]
        assert bool(following) is not state.terminal, "an end has nothing after it"
        if not state.terminal:
            # In every live state, the queue can end a request and give it back.
            assert next_state(state, JobEvent.FAIL, Component.QUEUE) is Status.ERROR
            assert next_state(state, JobEvent.GIVE_BACK, Component.QUEUE) in WAITING


def test_ended_request_leaves_no_garbage(tmp_path: Path) -> None:
    """A result that its client never reads must not wait for the garbage collector."""

    async def live_and_end() -> None:
        broker = MemoryBroker()
        responder = Responder(broker, FileStore(tmp_path, 3600))
        lifecycle = QueueLifecycle(broker, responder)
        client = await broker.subscribe()
        sent = (CONFIG.key, "0.8", Wire.ENVELOPE, b"", False, "http://here")
        await broker.submit(Request(*sent, subscription_id=client.id))
        request = await broker.claim()
        job = lifecycle.claim(request)
        assert job is not None
        await lifecycle.report(job, Response(request.id, Status.QUEUED))
        await asyncio.sleep(0)  # its client is watched
        await lifecycle.fail(job, "as the test wants it")
        await eventually(lambda: len(asyncio.all_tasks()) == 1)

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        asyncio.run(live_and_end())
        gc.collect()
        assert not [thing for thing in gc.garbage if isinstance(thing, Request)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_only_terminal_transitions_store_end() -> None:
    for transition in TRANSITIONS.values():
        ends = transition.target is not None and transition.target.terminal
        assert ends is (transition.stored is Stored.END)


@pytest.mark.parametrize(
    ("state", "event", "by"),
    [
        (Status.COMPLETED, JobEvent.FAIL, Component.QUEUE),
        (Status.ERROR, JobEvent.COMPLETE, Component.REPLICA),
        (Status.COMPLETED, JobEvent.START, Component.REPLICA),
        (Status.RUNNING, JobEvent.WAIT, Component.QUEUE),
        (Status.QUEUED, JobEvent.COMPLETE, Component.QUEUE),
        (Status.RECEIVED, JobEvent.DISPATCH, Component.QUEUE),
        (Status.QUEUED, JobEvent.PROVISION, Component.REPLICA),
        (None, JobEvent.CLAIM, Component.GATEWAY),
    ],
)
def test_illegal_transition_is_rejected(
    state: Status | None, event: JobEvent, by: Component
) -> None:
    with pytest.raises(IllegalTransitionError, match=event.value):
        next_state(state, event, by)


# Every order of events


class Scripted:
    """A `ModelActor` that runs a request until the test ends it."""

    def __init__(self, lives: Lives) -> None:
        self.shared_passes = None
        self.ended = asyncio.Event()
        self.device_failure: DeviceFailure | None = None
        self.model: ServedModel | None = None
        self._lives = lives
        self._running: asyncio.Future[Response | Exception] | None = None
        self._request: Request | None = None
        self._cancelled: str | None = None

    async def start(self, progress: Progress) -> None:
        self._lives.scripted.append(self)

    async def to_cache(self) -> None:
        self.finish(ReplicaEvictedError("it was evicted"))

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        pass

    async def stop(self) -> None:
        self.finish(ReplicaEvictedError("it was ended"))
        self.ended.set()

    def lose(self) -> None:
        self.ended.set()
        self.finish(ReplicaLostError("it was lost"))

    async def run(self, request: Request, respond: Respond) -> Response:
        assert self._running is None, "two at once"
        self._cancelled = None
        self._running = asyncio.get_running_loop().create_future()
        try:
            await announce(request, respond)
            await respond(Response(request.id, Status.RUNNING, "It runs."))
            self._request = request
            if self._lives.is_over:
                self.finish(Status.COMPLETED)
            if self._cancelled is not None:
                return Response(request.id, Status.ERROR, self._cancelled)
            outcome = await self._running
        finally:
            self._running = self._request = None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def cancel(self, reason: str) -> None:
        self._cancelled = reason
        if self._request is not None:
            self.finish(Response(self._request.id, Status.ERROR, reason))

    def finish(self, outcome: Response | Status | Exception) -> None:
        if self._running is None or self._running.done():
            return
        if isinstance(outcome, Status):
            if self._request is None:
                return
            outcome = Response(self._request.id, outcome, "It ended.")
        self._running.set_result(outcome)


@dataclass
class Client:
    """A client that listens or polls."""

    lives: Lives
    request: Request
    subscription: Subscription | None = None
    ends: list[Response] = field(default_factory=list)
    has_been_away: bool = False
    listening: asyncio.Task[None] | None = None

    async def _listen(self, subscription: Subscription) -> None:
        while True:
            response = frames.read(await subscription.next())
            assert response.id == self.request.id
            # A leader that took over meanwhile may report an ended request as waiting.
            assert not (self.ends and response.status.terminal), (self.ends, response)
            if response.status.terminal:
                self.ends.append(response)

    async def come(self) -> None:
        self.subscription = await self.lives.gateway.subscribe(self.request.subscription_id)
        self.listening = asyncio.create_task(self._listen(self.subscription))

    async def leave(self) -> None:
        assert self.subscription is not None
        assert self.listening is not None
        if self.listening.done():
            self.listening.result()
        self.has_been_away = True
        await end([self.listening])
        await self.subscription.close()
        self.subscription = None

    async def has_end(self) -> bool:
        if self.request.subscription_id is None:
            kept = await last_response(self.lives.objects, self.request.id)
            return kept is not None and kept.status.terminal
        if self.listening is not None and self.listening.done() and self.subscription:
            self.listening.result()
        return bool(self.ends) or self.has_been_away


@dataclass
class Leader:
    """A dispatcher and its controller, with its own broker if there are several leaders."""

    broker: Broker
    controller: Controller
    dispatcher: Dispatcher
    actors: list[RayModelActor]
    lanes: JobSender | None = None

    async def leave(self) -> None:
        """Hand over in good order."""
        await self.dispatcher.stop()
        await self._go()

    async def crash(self) -> None:
        """End without a hand-over."""
        await end([*self.dispatcher._tasks.values(), *self.dispatcher.lifecycle._tasks])
        await self.dispatcher.stop()
        await self._go()

    async def _go(self) -> None:
        await self.controller.leave()
        for actor in self.actors:
            actor.leave()
        if self.lanes is not None:
            await self.lanes.stop()
            await self.broker.stop()


class Lives:
    """A server, its clients, and the events that can happen to them."""

    def __init__(self, folder: Path, url: str | None, *, spools: bool = False) -> None:
        self.url = url
        self.folder = folder
        self.objects = FileStore(folder, 3600)
        self.spool = folder / "spool"
        self.gateway: Broker = self.redis() if url is not None else self.memory(spools=spools)
        self.kept: dict[str, bytes] = {}
        """Ends of polled requests when the server was killed."""
        self.clients: list[Client] = []
        self.leaders: list[Leader] = []
        self.scripted: list[Scripted] = []
        self.remote: list[Process] = []
        self.is_over = False
        self._stuck: list[Client] = []
        self._numbers = itertools.count()

    def redis(self) -> RedisBroker:
        assert self.url is not None
        return RedisBroker(self.url, self.objects, SIGNER, inline_bytes=1000)

    def memory(self, *, spools: bool) -> MemoryBroker:
        return MemoryBroker(spool=Spool(self.spool, self.objects) if spools else None)

    async def start(self) -> None:
        if isinstance(self.gateway, RedisBroker):
            await self.gateway.client.flushall()
        await self.gateway.start()
        await self.lead()

    # Leaders

    async def lead(self) -> None:
        """Add a leader without notifying earlier leaders."""
        whereabouts: dict[str, RayModelActor] = {}
        ray_actors: list[RayModelActor] = []
        lanes = None
        broker: Broker = self.gateway
        if self.url is not None:
            broker = own = self.redis()
            await broker.start()
            lanes = JobSender(own)
            lanes.start()

        def make(config: DeploymentConfig, generation: str, place: PlacedReplica) -> Any:
            if lanes is None:
                return Scripted(self)
            node = Process(self, config, generation, place)
            self.remote.append(node)
            actor = RayModelActor(place.name, lambda: node, lanes, whereabouts)
            ray_actors.append(actor)
            return actor

        rules = PlacementRules(drain_s=BRIEFLY_S)
        controller = Controller(Models([CONFIG]), make, unmeasured, one_machine, rules=rules)
        await controller.discover()
        policy = QueuePolicy(update_interval_s=BRIEFLY_S, max_attempts=2)
        dispatcher = Dispatcher(controller, broker, Responder(broker, self.objects), policy)
        if lanes is not None:
            orphans = []
            for node in self.remote:
                if node.killed.is_set():
                    continue
                actor = RayModelActor(node.place.name, lambda: None, lanes, whereabouts, node)
                ray_actors.append(actor)
                description = await actor.describe()
                if description["level"] is None or description["moving"] or description["ended"]:
                    await actor.stop()
                    continue
                whereabouts.update(dict.fromkeys(description["requests"], actor))
                level = DeploymentLevel(description["level"])
                place = PlacedReplica(**description["place"], level=level)
                orphans.append(OrphanReplica(place, CONFIG, actor, True))
            dispatcher.adopt(orphans)
        dispatcher.start()
        self.leaders.append(Leader(broker, controller, dispatcher, ray_actors, lanes))

    async def restart(self, *, kill: bool) -> None:
        """End the one process of an embedded server, and start another on the files that it leaves."""
        if kill:
            left = self.spool.with_name(f"{self.spool.name}+")
            shutil.copytree(self.spool, left)
            self.kept |= {path.name: path.read_bytes() for path in self.folder.glob("ends/*")}
        for client in self.clients:
            if client.subscription is not None and not client.ends:
                await client.leave()
        leader = self.leaders.pop()
        await (leader.crash() if kill else leader.leave())
        await self.gateway.stop()
        for replica in self.scripted:
            replica.ended.set()
        self.scripted.clear()
        if kill:
            self.spool = left
        self.gateway = broker = self.memory(spools=True)
        await broker.start()
        await Responder(broker, self.objects).resume(broker.unfinished)
        for client in self.clients:
            if client.request.subscription_id is None:
                assert await last_response(self.objects, client.request.id)
        await self.lead()

    # Events

    async def submit(self, *, polled: bool) -> None:
        number = next(self._numbers)
        request = Request(
            CONFIG.key,
            "0.8",
            Wire.ENVELOPE,
            b"x" * (2000 if number % 3 == 0 else 10),
            False,
            "http://here",
            subscription_id=None if polled else f"subscription {number}",
            user=f"user {number % 2}",
        )
        client = Client(self, request)
        if not polled:
            await client.come()
        if polled:
            await Responder(self.gateway, self.objects).respond(
                request, Response(request.id, Status.RECEIVED)
            )
        await self.gateway.submit(request)
        self.clients.append(client)

    async def cancel(self, client: Client) -> None:
        await self.leaders[-1].dispatcher.cancel(client.request.id, "Cancelled.")

    async def evict(self, number: int, *, cold: bool) -> None:
        controller = self.leaders[-1].controller
        if places := list(controller.cluster.replicas()):
            place = places[number % len(places)]
            controller.evict(replica_keys=[place.key], cold=cold)

    def finish(self, number: int, outcome: Status | Exception) -> None:
        if running := [replica for replica in self.scripted if replica._request is not None]:
            running[number % len(running)].finish(outcome)

    async def lose(self, number: int, *, process: bool) -> None:
        """Lose a model process, or the whole replica's process."""
        living = [replica for replica in self.scripted if not replica.ended.is_set()]
        if process and self.remote:
            self.remote[number % len(self.remote)].kill()
        elif living:
            living[number % len(living)].lose()

    async def settle(self, times: int) -> None:
        """Let the event loop run for a number of short waits."""
        for _ in range(times):
            await asyncio.sleep(0.002)

    # The end of a simulation

    async def end(self) -> None:
        """Let all requests finish, and check that each one has ended once."""
        for leader in self.leaders[:-1]:
            await leader.crash()
        self.is_over = True
        for replica in self.scripted:
            replica.finish(Status.COMPLETED)
        try:
            await eventually(
                self._has_ended,
                lambda: f"these have no end: {self._stuck}, these are held: {self._held()}",
            )
            await self.settle(10)  # for updates after an end
            assert all([await client.has_end() for client in self.clients])
        finally:
            await self._close()
        for client in self.clients:
            if client.request.subscription_id is not None and not client.has_been_away:
                assert len(client.ends) == 1
        for name, content in self.kept.items():
            assert (self.folder / "ends" / name).read_bytes() == content, "an end is the last"

    def _held(self) -> list[str]:
        return [request.id for request in self.leaders[-1].dispatcher.lifecycle.held]

    async def _has_ended(self) -> bool:
        self._stuck = [client for client in self.clients if not await client.has_end()]
        return not self._stuck and not self._held() and await self._has_let_go()

    async def _has_let_go(self) -> bool:
        if isinstance(self.gateway, MemoryBroker):
            return not self.gateway._unfinished and self.gateway._bytes == 0
        assert isinstance(self.gateway, RedisBroker)
        redis = self.gateway.client
        waiting, held = await redis.xlen("queue"), int(await redis.get("queue:bytes") or 0)
        return not waiting and not held and not await redis.keys("request:*")

    async def _close(self) -> None:
        leader = self.leaders[-1]
        await leader.dispatcher.stop()
        await leader.controller.stop()
        await leader._go()
        for node in self.remote:
            await node.close()
        for client in self.clients:
            if client.subscription is not None:
                await client.leave()
        await self.gateway.stop()


async def unmeasured(config: DeploymentConfig, generation: str) -> Measured:
    return Measured(1)


async def one_machine() -> list[Node]:
    return [Node("here", "here", Resources.of([], REPLICAS, 1.0))]


class Remote(RemoteActor):
    """A replica in its own process, with its own connections."""

    def __init__(self, lives: Lives, description: Mapping[str, Any], name: str) -> None:
        super().__init__(description)
        self._lives = lives
        self._name = name
        self.broker = lives.redis()

    async def prepare(self) -> NodeServices:
        await self.broker.start()
        assert self._leader is not None
        channel = await JobReceiver.open(self.broker, self._name, self._leader)
        responder = Responder(self.broker, self._lives.objects)
        return NodeServices(Scripted(self._lives), self.broker, responder, channel)

    async def end(self) -> None:
        """End like a killed process."""
        runs = self._jobs._runs.values() if self._jobs is not None else ()
        lifecycle = self._jobs._lifecycle._tasks if self._jobs is not None else ()
        tasks = [self._starting, self._watching, self._running, *runs, *lifecycle]
        await end([task for task in tasks if task is not None])
        if isinstance(self._actor, Scripted) and self._actor in self._lives.scripted:
            self._lives.scripted.remove(self._actor)
        await self.broker.stop()


class Process:
    """Ray's handle to a replica's process; its methods fail once the process is killed."""

    def __init__(
        self, lives: Lives, config: DeploymentConfig, generation: str, place: PlacedReplica
    ) -> None:
        held = {f.name: getattr(place, f.name) for f in fields(place) if f.name != "level"}
        described = {"config": asdict(config), "generation": generation, "place": held}
        self.place = place
        self.killed = asyncio.Event()
        self._remote = Remote(lives, described, place.name)
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Task[None] | None = None

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *arguments: Any, **named: Any) -> asyncio.Future[Any]:
        call = asyncio.ensure_future(self._answer(method, *arguments, **named))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda finished: finished.cancelled() or finished.exception())
        return call

    async def _answer(self, method: str, *arguments: Any, **named: Any) -> Any:
        if not self.killed.is_set():
            working = asyncio.ensure_future(getattr(self._remote, method)(*arguments, **named))
            killed = asyncio.ensure_future(self.killed.wait())
            await asyncio.wait({working, killed}, return_when=asyncio.FIRST_COMPLETED)
            killed.cancel()
            if not self.killed.is_set():
                return working.result()
            await end([working])
        raise RayActorError

    def kill(self) -> None:
        if not self.killed.is_set():
            self.killed.set()
            self._ending = asyncio.create_task(self._remote.end())

    def kill_from_a_thread(self) -> None:
        self._loop.call_soon_threadsafe(self.kill)

    async def close(self) -> None:
        self.kill()
        assert self._ending is not None
        await self._ending
        await end(self._calls)


class LivesMachine(RuleBasedStateMachine):
    """Orders of events that Hypothesis generates."""

    url: str | None = None

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop() if self.url else VirtualLoop()
        self.lives = self.loop.run_until_complete(self._begin())

    async def _begin(self) -> Lives:
        lives = Lives(Path(self.folder.name), self.url)
        await lives.start()
        return lives

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.play(self.lives.end())
        finally:
            self.loop.close()
            self.folder.cleanup()

    def play(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    def client(self, number: int) -> Client | None:
        clients = [c for c in self.lives.clients if not c.ends]
        return clients[number % len(clients)] if clients else None

    @rule(polled=st.booleans())
    def submit(self, polled: bool) -> None:
        self.play(self.lives.submit(polled=polled))

    @rule(times=st.integers(1, 30))
    def time_passes(self, times: int) -> None:
        self.play(self.lives.settle(times))

    @rule(number=st.integers(0, 9), outcome=st.sampled_from([Status.COMPLETED, Status.ERROR]))
    def a_run_ends(self, number: int, outcome: Status) -> None:
        self.lives.finish(number, outcome)

    @rule(number=st.integers(0, 9))
    def a_run_has_a_defect(self, number: int) -> None:
        self.lives.finish(number, KeyError("a defect"))

    @rule(number=st.integers(0, 9))
    def a_client_leaves(self, number: int) -> None:
        if (client := self.client(number)) is not None and client.subscription is not None:
            self.play(client.leave())

    @rule(number=st.integers(0, 9))
    def a_client_comes_back(self, number: int) -> None:
        client = self.client(number)
        if client is not None and client.request.subscription_id and client.subscription is None:
            self.play(client.come())

    @rule(number=st.integers(0, 9))
    def a_job_is_cancelled(self, number: int) -> None:
        if (client := self.client(number)) is not None:
            self.play(self.lives.cancel(client))

    @rule(number=st.integers(0, 9), process=st.booleans())
    def a_replica_is_lost(self, number: int, process: bool) -> None:
        self.play(self.lives.lose(number, process=process))

    @rule(number=st.integers(0, 9), cold=st.booleans())
    def a_replica_is_evicted(self, number: int, cold: bool) -> None:
        self.play(self.lives.evict(number, cold=cold))


class RestartsMachine(LivesMachine):
    """Orders of events that include stops, kills and restarts of the server."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.loop = (
            asyncio.new_event_loop()
        )  # the spool has a thread, which no virtual time waits for
        self.lives = self.loop.run_until_complete(self._begin())

    async def _begin(self) -> Lives:
        lives = Lives(Path(self.folder.name), None, spools=True)
        await lives.start()
        return lives

    @rule(kill=st.booleans())
    def the_server_starts_again(self, kill: bool) -> None:
        self.play(self.lives.restart(kill=kill))


class LeadersMachine(LivesMachine):
    """Orders of events that include hand-overs and crashes of leaders."""

    @rule()
    def a_leader_hands_over(self) -> None:
        self.play(self.lives.leaders.pop().leave())
        self.play(self.lives.lead())

    @rule()
    def a_leader_crashes(self) -> None:
        self.play(self.lives.leaders.pop().crash())
        self.play(self.lives.lead())

    @rule()
    def two_leaders_lead(self) -> None:
        if len(self.lives.leaders) < 2:
            self.play(self.lives.lead())


@pytest.fixture(autouse=True)
def hasty() -> Iterator[None]:
    """Shorten waits of seconds."""
    with (
        patch.object(queue_lifecycle, "_CHECK_S", BRIEFLY_S / 10),
        patch.object(redis_broker, "_POLL_S", BRIEFLY_S),
        patch.object(redis_broker, "_INHERIT_S", BRIEFLY_S),
        patch.object(redis_broker, "_BLOCK_MS", 20),
        patch.object(remote_actor, "_LOOK_S", BRIEFLY_S),
        patch.object(actors, "_SOON_S", 0.1),
        patch.object(ray, "kill", Process.kill_from_a_thread),
    ):
        yield


def play(machine: type[LivesMachine], share: float, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(share),
            stateful_step_count=steps,
            phases=[Phase.generate],  # Hypothesis cannot shrink an example that depends on time
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.hypothesis
def test_each_request_ends_once_on_embedded_server() -> None:
    play(LivesMachine, 1, 40)


@pytest.mark.hypothesis
def test_each_request_ends_once_across_restarts_of_embedded_server() -> None:
    play(RestartsMachine, 0.2, 40)


@pytest.mark.engine
@pytest.mark.hypothesis
def test_each_request_ends_once_with_redis_and_changing_leaders(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeadersMachine, "url", redis.url)
    play(LeadersMachine, 0.2, 30)
