"""A replica on a node whose actor has no model: it waits for as long as a request says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ndif.host.announcement import announce
from ndif.host.device_errors import DeviceFailure
from ndif.host.jobs import Equipment
from ndif.host.port import (
    ActorError,
    DeviceError,
    Progress,
    ReplicaEvictedError,
    ReplicaLostError,
    Respond,
)
from ndif.host.replica import Replica
from ndif.schema.request import Request
from ndif.schema.response import InlineResult, Response
from ndif.schema.status import Status

FAILS = "not to be loaded"


class Waiting:
    """An actor that runs a request for the seconds that its `env` says; for ever, if it says nothing."""

    def __init__(self, start_s: float = 0.0, *, fails: bool = False) -> None:
        self.ended = asyncio.Event()
        self.device_failure: DeviceFailure | None = None
        self.model: Mapping[str, Any] = {}
        self.ran: list[str] = []
        self.moves: list[str] = []
        self.runs = asyncio.Event()
        """Whether it runs something."""
        self._start_s = start_s
        self._fails = fails
        self._running: asyncio.Future[Exception | str] | None = None

    async def start(self, progress: Progress) -> None:
        progress(1, 2)
        await asyncio.sleep(self._start_s)
        if self._fails:
            self.ended.set()
            if self.device_failure is not None:
                raise DeviceError(FAILS, self.device_failure)
            raise ActorError(FAILS)
        self.model = {"class": "Waiting"}

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

    async def __call__(self, request: Request, respond: Respond) -> Response:
        assert self._running is None, "two at once"
        await announce(request, respond)
        self.ran.append(request.id)
        running = self._running = asyncio.get_running_loop().create_future()
        try:
            await respond(Response(request.id, Status.RUNNING))
            self.runs.set()
            outcome = await asyncio.wait_for(running, request.env.get("for_s"))
        except asyncio.TimeoutError:
            result = InlineResult(b"result", False) if request.session else None
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


class StandIn(Replica):
    """What a cluster starts where there is nothing to load."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__(said)
        self.actor = Waiting(said["config"].get("execution_timeout_s") or 0.0)
        self.told: list[Response] = []
        self.gone: set[str] = set()
        """Requests whose clients have left."""
        self.cannot_tell = False
        self.jobs: asyncio.Queue[Request] = asyncio.Queue()
        """What comes by the quick way."""
        self.given_back: asyncio.Queue[Request] = asyncio.Queue()

    async def prepare(self) -> Equipment:
        return Equipment(self.actor, self._tell, self._has_left, self.jobs.get, self.given_back.put)

    async def _tell(self, request: Request, response: Response) -> bool:
        if self.cannot_tell and response.status.terminal:
            raise OSError("nobody answers")
        self.told.append(response)
        return True

    async def _has_left(self, request: Request) -> bool:
        return request.id in self.gone
