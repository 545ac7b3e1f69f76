"""A replica on a node whose actor has no model: each request waits for a given time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from ndif.cluster.remote_actor import NodeServices, RemoteActor
from ndif.host.device_errors import DeviceFailure
from ndif.host.execution import announce
from ndif.host.port import (
    ActorError,
    FailedDeviceError,
    Progress,
    ReplicaEvictedError,
    ReplicaLostError,
    Respond,
    ServedModel,
)
from ndif.schema.request import Request
from ndif.schema.response import InlineResult, Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker
from ndif.stores.broker.redis.job_channels import Introduction, JobReceiver
from ndif.stores.responder import Responder
from tests.waiting import eventually

FAILS = "not to be loaded"
MODEL = ServedModel("Waiting", 1, "float32", "cpu", None, "/nowhere", None)
IS_LOADING = "is-loading"
"""Name of a file in the checkpoint's folder; the replica is loaded once this file is gone."""


class Waiting:
    """An actor that runs a request for `env["for_s"]` seconds; for ever, if unset."""

    def __init__(self, loading: Path | None = None, *, fails: bool = False) -> None:
        """`loading` is a file that exists while the model loads; None to load at once."""
        self.shared_passes = None
        self.ended = asyncio.Event()
        self.device_failure: DeviceFailure | None = None
        self.model: ServedModel | None = None
        self.ran: list[str] = []
        self.moves: list[str] = []
        self.runs = asyncio.Event()
        """Set while a request runs."""
        self._loading = loading
        self._fails = fails
        self._running: asyncio.Future[Exception | str] | None = None

    async def start(self, progress: Progress) -> None:
        progress(1, 2)
        if self._loading is not None:
            await eventually(lambda: not self._loading.exists())
        if self._fails:
            self.ended.set()
            if self.device_failure is not None:
                raise FailedDeviceError(FAILS, self.device_failure)
            raise ActorError(FAILS)
        self.model = MODEL

    async def to_cache(self) -> None:
        self.moves.append("to")
        self._end(ReplicaEvictedError("it was taken off"))

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        if self._fails:
            raise ActorError(FAILS)
        self.moves.append("from")

    async def stop(self) -> None:
        self._end(ReplicaEvictedError("it was ended"))
        self.ended.set()

    def die(self) -> None:
        self._end(ReplicaLostError("it died"))
        self.ended.set()

    async def run(self, request: Request, respond: Respond) -> Response:
        assert self._running is None, "two at once"
        await announce(request, respond)
        self.ran.append(request.id)
        running = self._running = asyncio.get_running_loop().create_future()
        try:
            await respond(Response(request.id, Status.RUNNING))
            self.runs.set()
            outcome = await asyncio.wait_for(running, request.env.get("for_s"))
        except asyncio.TimeoutError:
            result = InlineResult(b"result", False) if request.subscription_id else None
            return Response(request.id, Status.COMPLETED, "Done.", result)
        finally:
            self._running = None
            self.runs.clear()
        if isinstance(outcome, Exception):
            raise outcome
        return Response(request.id, Status.ERROR, outcome)

    def cancel(self, reason: str) -> None:
        self._end(reason)

    def _end(self, outcome: Exception | str) -> None:
        if self._running is not None and not self._running.done():
            self._running.set_result(outcome)


class StandIn(RemoteActor):
    """A replica of a cluster without a model to load, with its own stores and job channel."""

    def __init__(self, order: bytes) -> None:
        super().__init__(order)
        self.actor = Waiting(Path(self._order.config.checkpoint, IS_LOADING))
        self.responses: list[Response] = []
        self.kept: dict[str, Status] = {}
        """The last status of each request that its client sees."""
        self.gone: set[str] = set()
        """Subscriptions of clients that have left."""
        self.cannot_tell = False
        self.leader: Introduction | None = None
        self.jobs: asyncio.Queue[Request] = asyncio.Queue()
        """Jobs of the channel."""
        self.given_back: asyncio.Queue[Request] = asyncio.Queue()

    async def prepare(self) -> NodeServices:
        return NodeServices(
            self.actor, cast(Broker, self), cast(Responder, self), cast(JobReceiver, self)
        )

    # As a Responder

    async def respond(
        self, request: Request, response: Response, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        if unless():
            return True
        if self.cannot_tell and response.status.terminal:
            raise OSError("nobody answers")
        self.responses.append(response)
        self.kept[request.id] = response.status
        return True

    async def ensure_end(self, request: Request, end: Response) -> None:
        if not self.kept[request.id].terminal:
            await self.respond(request, replace(end, delivered=False))

    # As a Broker

    async def disconnected(self, subscriptions: Iterable[str]) -> set[str]:
        return {*subscriptions} & self.gone

    async def is_complete(self, request: Request) -> bool:
        return False

    # As a JobChannel

    def take_from(self, leader: Introduction) -> None:
        self.leader = leader

    async def next(self) -> Request:
        return await self.jobs.get()

    async def give_back(self, request: Request) -> None:
        await self.given_back.put(request)


class Frozen(StandIn):
    """A replica whose process is stopped before its first answer."""

    def __init__(self, order: bytes) -> None:
        super().__init__(order)
        os.kill(os.getpid(), signal.SIGSTOP)
