"""The cost of a job beside other load: a long queue, many models, many connected clients.

The models do nothing. Each sample has a new server, on which ten users have jobs of one model and send a
new job for each that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

import uvloop

from bench.clients.user import User, key_of, pings
from bench.figures import Figure
from bench.sampling import Samples, in_turn, quantile
from bench.scenario import Site
from bench.servers.machine import Machine
from bench.servers.no_op import no_op_machine
from bench.servers.processes import anonymous

_ROUNDS = 5
_FEW, _MANY, _MODELS = 10, 10_000, 200
_JOBS, _WARM_UP = 400, 100
_OTHER_JOBS = 50
_PINGS = 250
_CLIENTS = 1000
_LOOK_S = 0.005
_OTHER = key_of("bench/nothing-1")


@dataclass(frozen=True)
class State:
    """The queue, the models and the clients of a server."""

    waiting: int = _FEW
    models: int = 2
    idle: int = 0
    """Clients with a live channel and no job."""


_STATES = {
    "ten jobs": State(),
    f"{_MANY:,} jobs queued": State(waiting=_MANY),
    f"{_MODELS} models": State(models=_MODELS),
    "500 idle clients": State(idle=500),
    "2,000 idle clients": State(idle=2000),
}
_FEWEST, _LONGEST = [*_STATES][:2]


@dataclass
class Beside:
    """Measurements during a queue, by the name of a state."""

    pings: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    others: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Median seconds of a job of another model."""


def measure(site: Site) -> Iterator[Figure]:
    """Measure the states in turn, then the memory of clients that wait."""
    beside = Beside()
    samples = in_turn(
        {
            name: lambda name=name, state=state: _seconds(site.environment, name, state, beside)
            for name, state in _STATES.items()
        },
        rounds=_ROUNDS,
        warm_up=0,
    )
    yield from _costs(samples)
    few, many = beside.others[_FEWEST], beside.others[_LONGEST]
    how = f"{statistics.median(many) * 1e3:.1f} and {statistics.median(few) * 1e3:.1f} ms"
    name = f"a job of another model: {_LONGEST} / {_FEWEST}"
    yield Figure.of(name, [a / b for a, b in zip(many, few, strict=True)], 1.1, "x", how=how)
    quiet, full = (quantile(beside.pings[name], 0.99) * 1e3 for name in (_FEWEST, _LONGEST))
    how = f"4 x that of {_FEWEST}, {quiet:.1f} ms, or 20; {len(beside.pings[_LONGEST])} pings"
    yield Figure(f"p99 of /ping: {_LONGEST}", full, max(20.0, 4 * quiet), "ms", how=how)
    with no_op_machine(site.environment) as machine:
        yield uvloop.run(_memory(machine))


def _costs(samples: Samples) -> Iterator[Figure]:
    for name in [*_STATES][1:]:
        ratio = samples.per_round(lambda state, few: state / few, name, _FEWEST)
        how = (
            f"{samples.median(name) * 1e3:.2f} and {samples.median(_FEWEST) * 1e3:.2f} ms; "
            f"{samples.summary}"
        )
        yield Figure.of(f"cost of a no-op job: {name} / {_FEWEST}", ratio, 1.1, "x", how=how)


def _seconds(environment: Mapping[str, str], name: str, state: State, beside: Beside) -> float:
    """Return the seconds per job in a state."""
    with no_op_machine(environment, state.models) as machine:
        return uvloop.run(_in_state(machine, name, state, beside))


async def _in_state(machine: Machine, name: str, state: State, beside: Beside) -> float:
    keys = [*machine.keys.values()]
    async with _idle(machine, state.idle):
        async with _served(machine, len(keys)) as warm:
            await warm.until(lambda: len(warm.ended) >= _JOBS)
        async with _held(machine) as release, _served(machine, state.waiting) as crowd:
            await crowd.until(lambda: crowd.sent >= state.waiting)
            # Measure in each state: a server is slower in the seconds after its clients have connected.
            beside.pings[name] += await pings(machine.port, _PINGS)
            beside.others[name].append(await _another_job(User(machine.port, _OTHER, keys[0])))
            release()
            await crowd.until(lambda: len(crowd.ended) > _WARM_UP + _JOBS)
            return (crowd.ended[_WARM_UP + _JOBS] - crowd.ended[_WARM_UP]) / _JOBS


@dataclass
class Crowd:
    """Users who each keep a number of jobs at a server: they send a new job for each that ends."""

    sent: int = 0
    ended: list[float] = field(default_factory=list)
    """Time of each job's end, by `time.perf_counter`."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def add(self, user: User, jobs: int) -> None:
        """Send the jobs of a connected user."""
        may_send = asyncio.Semaphore(jobs)

        async def send() -> None:
            while True:
                await may_send.acquire()
                await user.send()
                self.sent += 1

        async def receive() -> None:
            while True:
                await user.result()
                self.ended.append(time.perf_counter())
                may_send.release()

        self._tasks += [asyncio.create_task(send()), asyncio.create_task(receive())]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until the condition `is_so` is true; raise any error of a user."""
        while not is_so():
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Stop sending and receiving."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _served(machine: Machine, jobs: int) -> AsyncIterator[Crowd]:
    """Keep `jobs` jobs of all users together at a server; yield the crowd."""
    users = [User(machine.port, api_key=key) for key in machine.keys.values()]
    crowd = Crowd()
    for user in users:
        await user.connect()
        crowd.add(user, jobs // len(users))
    try:
        yield crowd
    finally:
        await crowd.stop()
        for user in users:
            user.close()


@contextlib.asynccontextmanager
async def _held(machine: Machine) -> AsyncIterator[Callable[[], None]]:
    """Keep the model busy; yield a function that ends this."""
    user = User(machine.port, api_key=next(iter(machine.keys.values())))
    tell = machine.folder / "running"
    await user.connect()
    await user.send(json.dumps({"tell": str(tell)}).encode())
    while not tell.exists():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(_LOOK_S)
    receiving = asyncio.create_task(user.receive())
    try:
        yield tell.unlink
    finally:
        receiving.cancel()
        user.close()


@contextlib.asynccontextmanager
async def _idle(machine: Machine, count: int) -> AsyncIterator[None]:
    """Connect `count` clients that send nothing."""
    keys = [*machine.keys.values()]
    users = [User(machine.port, api_key=keys[number % len(keys)]) for number in range(count)]
    receiving = []
    for user in users:
        await user.connect()
        receiving.append(asyncio.create_task(user.receive()))
    try:
        yield
    finally:
        for task, user in zip(receiving, users, strict=True):
            task.cancel()
            user.close()


async def _another_job(user: User) -> float:
    """Return the median seconds of a job of a user who sends one after the other."""
    took = []
    await user.connect()
    for _ in range(_OTHER_JOBS):
        began = time.perf_counter()
        await user.run()
        took.append(time.perf_counter() - began)
    user.close()
    return statistics.median(took)


async def _memory(machine: Machine) -> Figure:
    """Measure a server's growth per client that waits for its job."""
    async with _served(machine, len(machine.keys)) as warm:
        await warm.until(lambda: len(warm.ended) >= _JOBS)
    keys = [*machine.keys.values()]
    users = [User(machine.port, api_key=keys[number % len(keys)]) for number in range(_CLIENTS)]
    crowd = Crowd()
    async with _held(machine):
        before = anonymous(machine.pid)
        for user in users:
            await user.connect()
            crowd.add(user, 1)
        await crowd.until(lambda: crowd.sent >= _CLIENTS)
        grown = anonymous(machine.pid) - before
        await crowd.stop()
    how = f"growth of the server by {_CLIENTS:,} live clients with a queued job each"
    return Figure("memory of a waiting client", grown / _CLIENTS / 1e3, 100, "kB", how=how)
