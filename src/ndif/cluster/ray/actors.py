"""A replica on another node: a `ModelActor` over Ray.

Ray keeps a process on the replica's node (`ndif.cluster.remote_actor`). Only the leader knows its pending
calls to that process; the next leader repeats them.

Jobs are sent over a Redis channel: two dedicated cores handle only 500 to 1,200 Ray calls a second, and the
job itself costs at most a tenth of a call. If the channel does not answer soon, a Ray call waits
for the job's end, and returns even if the replica is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RayActorError, RayError

from ndif.cluster.remote_actor import JobAnswer, MoveAnswer, ReplicaDescription
from ndif.config.units import format_duration
from ndif.host.device_errors import DeviceFailure
from ndif.host.execution import announce, announcement
from ndif.host.heartbeat import until_frozen
from ndif.host.port import (
    ActorError,
    EndedError,
    FailedDeviceError,
    Progress,
    ReplicaEvictedError,
    ReplicaLostError,
    Respond,
    ServedModel,
)
from ndif.runtime.typed_json import from_json
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker import BrokerUnavailableError, ClientLeftError
from ndif.stores.broker.encoding import encode_request
from ndif.stores.broker.redis.job_channels import JobSender
from ndif.tasks import end, in_daemon_thread, start, within

T = TypeVar("T")


logger = logging.getLogger(__name__)

_NODE_GONE = "its node is gone"
_SILENT = "its process does not answer"
_ENDED = "the replica was ended"
_AGAIN_S = 0.5
_SILENT_S = 60.0
"""Seconds without an answer after which a replica's process counts as frozen."""
_MADE_S = 300.0
"""Seconds that Ray has to start a replica's process, until the first answer."""
_PINGS = 6
"""Number of pings to a process during `_SILENT_S`."""
_NO_PROGRESS = (-1, -1)
"""Progress that no replica has, so that a replica answers at once."""
_REPORT_S = 0.2
_SOON_S = 1.0
_STOP_S = 15.0
"""Seconds after which an ending replica is killed with its processes."""


@dataclass(eq=False)
class RayModelActor:
    """The leader's client of a replica in another process, over Ray and a job channel."""

    name: str
    make: Callable[[], Any]
    """Creates the process in Ray; may block for a long time."""
    job_sender: JobSender
    whereabouts: MutableMapping[str, RayModelActor]
    """Replicas that run an earlier leader's jobs, by request id."""
    _handle: Any = None
    """Ray's handle of the process; given if another leader has started the process."""
    node_id: str = ""
    """The replica's node; empty until it is known."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    device_failure: DeviceFailure | None = None
    model: ServedModel | None = None
    _making: asyncio.Future[Any] | None = None
    silent_s: float = _SILENT_S
    """Seconds without an answer after which the replica is ended."""
    shared_passes: None = None
    """None: a replica in another process runs each request alone."""
    made_s: float = _MADE_S
    """Seconds without a first answer after which the replica is ended."""
    _watching: list[asyncio.Task[None]] = field(default_factory=list)
    _run_by: tuple[str, RayModelActor] | None = None
    _cancels: bool = False
    """True once the running job was cancelled."""
    _news: asyncio.Future[Response | None] | None = None
    _evicted: bool = False
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the replica is given up, even if Ray does not report its end."""
    _why_gone: str = ""
    _unreached: int = 0
    """Number of calls that Ray could not deliver to the replica."""
    _cancelling: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self._handle is not None:
            self._take_handle(self._handle)

    async def describe(self) -> ReplicaDescription:
        """Introduce the leader to the replica, and return the replica's description of itself.

        Raises:
            ReplicaLostError: If the replica is lost.
            ValueError: If the replica is of another version.
        """
        await self._ask("follow", self.job_sender.introduction)
        described = from_json(ReplicaDescription, await self._ask("describe"))
        self.model = described.model
        return described

    def _take_handle(self, handle: Any) -> None:
        self._handle = handle
        self._watching = [
            asyncio.create_task(self._watch(), name="watch over a replica"),
            asyncio.create_task(self._end_if_silent(), name="sign of life"),
        ]

    async def _await_handle(self, making: asyncio.Future[Any]) -> None:
        """Take the handle once Ray has created the actor; `start` and `stop` may both wait for it."""
        handle = await asyncio.shield(making)
        if self._handle is None:
            self._take_handle(handle)

    async def start(self, progress: Progress) -> None:
        try:
            if self._handle is None:
                # Ray blocks here until its head answers.
                self._making = in_daemon_thread(self.make)
                await self._await_handle(self._making)
            reporting = asyncio.create_task(self._report(progress), name="progress")
            try:
                await self._ask("follow", self.job_sender.introduction)
                answer = from_json(MoveAnswer, await self._ask("start"))
            finally:
                reporting.cancel()
        except ReplicaLostError as error:
            self._end()
            raise ActorError(f"its process was lost while it loaded: {error}") from error
        except RayError as error:
            await self.stop()
            raise ActorError(f"Ray could not start it: {_first_line(error)}") from error
        await self._came_up(answer)

    async def _came_up(self, answer: MoveAnswer) -> None:
        if self._evicted:
            raise ActorError("it was ended while it started")
        if answer.error:
            await self.stop()
            if answer.device is not None:
                raise FailedDeviceError(answer.error, answer.device)
            raise ActorError(answer.error)
        self.model = answer.model

    async def _report(self, progress: Progress) -> None:
        reported = (0, 0)
        with contextlib.suppress(ReplicaLostError):
            while True:
                reported = tuple(await self._ask("progress", reported))
                progress(*reported)
                await asyncio.sleep(_REPORT_S)

    async def to_cache(self) -> None:
        with contextlib.suppress(ReplicaLostError):  # the loss also sets `ended`
            await self._ask("to_cache")

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        try:
            answer = from_json(MoveAnswer, await self._ask("from_cache", dict(gpu_mem_bytes_by_id)))
        except ReplicaLostError as error:
            raise ActorError(f"its process was lost: {error}") from error
        await self._came_up(answer)

    async def stop(self) -> None:
        self._evicted = self._evicted or not self.ended.is_set()
        if self._making is not None and self._handle is None:
            with contextlib.suppress(Exception):  # then there is no process to end
                await self._await_handle(self._making)
        if self._handle is not None:
            with contextlib.suppress(ReplicaLostError, RayError, asyncio.TimeoutError):
                await within(self._ask("stop"), _STOP_S)
            await self._kill()
        # Ray may not report the end, and is not asked again.
        self._give_up(_ENDED)

    async def _kill(self) -> None:
        with contextlib.suppress(RayError, RuntimeError, asyncio.TimeoutError):
            await within(in_daemon_thread(lambda: ray.kill(self._handle)), _STOP_S)

    def leave(self) -> None:
        """Stop watching the replica, and leave it running."""
        for task in self._watching:
            task.cancel()

    async def run(self, request: Request, respond: Respond) -> Response:
        """See `ModelActor.run`. The replica itself delivers all further updates."""
        self._cancels = False
        earlier = self.whereabouts.get(request.id)
        try:
            if earlier is not None:
                self._run_by = request.id, earlier
                response = await self._run_elsewhere(request, earlier, respond)
                if response is not None:
                    return response
            self._run_by = request.id, self
            if request.subscription_id is None:
                await announce(request, respond)
            return await self._run_by_channel(request) or await self._run(request)
        except ClientLeftError:
            if self._cancels and self._run_by == (request.id, self):
                # The job was not sent. If its client returns, the job is sent, and must then run.
                await end(self._cancelling)
                self._handle.revoke_cancel.remote(request.id)
            raise
        finally:
            self._run_by = None

    async def _run_elsewhere(
        self, request: Request, elsewhere: RayModelActor, respond: Respond
    ) -> Response | None:
        """Return the response from the replica that another leader chose; None if that replica was lost.

        Raise an `EndedError` if the replica was lost after the end of the job.
        """
        if not await self.job_sender.is_complete(
            request
        ):  # else the client already has the job's end
            await announce(request, respond)
        self.whereabouts.pop(request.id, None)
        try:
            return await elsewhere._run(request)
        except ReplicaLostError:
            if await self.job_sender.is_complete(request):
                raise EndedError from None
            if elsewhere is self:
                raise
            return None

    async def _run_by_channel(self, request: Request) -> Response | None:
        """Send a job over the replica's channel; return the response if it arrives soon, else None."""
        if self.ended.is_set():
            return None
        loop = asyncio.get_running_loop()
        news = self._news = loop.create_future()
        timer = loop.call_later(_SOON_S, self._no_news)
        try:
            return await self.job_sender.run(request, announcement(request), self.name, news)
        finally:
            timer.cancel()

    def _no_news(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _run(self, request: Request) -> Response:
        try:
            answer = from_json(JobAnswer, await self._ask("run", encode_request(request)))
        except ReplicaLostError as error:
            if self._evicted:
                raise ReplicaEvictedError(_ENDED) from error
            raise
        if answer.why == "evicted":
            raise ReplicaEvictedError(answer.reason)
        if answer.why == "away":
            raise BrokerUnavailableError(answer.reason)
        if answer.end is None:
            raise ReplicaLostError(answer.reason)
        return answer.end

    def cancel(self, reason: str) -> None:
        if self._run_by is not None:
            self._cancels = True
            request_id, actor = self._run_by
            # Send at once: a later `revoke_cancel` must arrive after this call.
            sent = actor._handle.cancel.remote(request_id, reason)
            start(actor._ensure_cancelled(sent, request_id, reason), self._cancelling, "cancel")

    async def _ensure_cancelled(self, sent: Any, request_id: str, reason: str) -> None:
        with contextlib.suppress(ReplicaLostError, RayError):
            try:
                await sent
            except ActorUnavailableError:
                await self._ask("cancel", request_id, reason)

    def node_is_gone(self) -> None:
        """End the replica with its node, regardless of Ray's reports about the replica itself.

        A restarted head may not report the death of an actor that ran on the previous head.
        """
        self._give_up(_NODE_GONE)

    def _give_up(self, why: str) -> None:
        self._why_gone = self._why_gone or why
        self._gone.set()
        self._end()

    async def _end_if_silent(self) -> None:
        """End the replica once its process does not answer: a stopped process keeps its connections.

        Ray itself reports an unreachable node.
        """
        silent_s = self.made_s
        with contextlib.suppress(ReplicaLostError):
            while await self._answers(silent_s):
                silent_s = self.silent_s
                await asyncio.sleep(silent_s / _PINGS)
            logger.error(
                "%s has not answered for %s and is ended", self.name, format_duration(silent_s)
            )
            self._give_up(_SILENT)
            await self._kill()

    async def _answers(self, within_s: float) -> bool:
        """Return False if the replica's process does not answer in time."""
        call = asyncio.ensure_future(self._ask("progress", _NO_PROGRESS))
        silent = asyncio.ensure_future(until_frozen(lambda: self._unreached, within_s))
        try:
            await asyncio.wait({call, silent}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                call.result()
            return call.done()
        finally:
            await end([call, silent])

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the replica until it answers; a repeated call acts once."""
        if self._handle is None:
            raise ReplicaLostError("the replica has not been started")
        given_up = asyncio.ensure_future(self._gone.wait())
        asking = asyncio.ensure_future(self._ask_until_answered(method, arguments))
        try:
            await asyncio.wait({asking, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise ReplicaLostError(self._why_gone)
        finally:
            given_up.cancel()
            asking.cancel()

    async def _ask_until_answered(self, method: str, arguments: tuple[Any, ...]) -> Any:
        while True:
            try:
                return await getattr(self._handle, method).remote(*arguments)
            except ActorUnavailableError as error:
                # The node is unreachable: either the node returns, or Ray declares it dead.
                self._unreached += 1
                logger.warning("a replica does not answer: %s", _first_line(error))
            except (RayActorError, ActorUnschedulableError) as error:
                self._end()
                # Ray also reports the death of a replica that was ended here: the first reason counts.
                raise ReplicaLostError(self._why_gone or _why(error)) from error
            await asyncio.sleep(_AGAIN_S)

    async def _watch(self) -> None:
        with contextlib.suppress(ReplicaLostError):
            if (failure := await self._ask("until_ended")) is not None:
                self.device_failure = DeviceFailure(*failure)
        self._end()

    def _end(self) -> None:
        self.ended.set()
        self._no_news()


def _why(error: RayError) -> str:
    text = str(error)
    if "node has died" in text or "node was terminated" in text:
        return _NODE_GONE
    if "doesn't exist any more or is infeasible" in text:
        return "the node that it was placed on is gone"
    return "the replica's process ended"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
