"""One request on one runner: its instructions, its updates and its result."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace

from ndif.config.settings import Settings
from ndif.host.port import Respond
from ndif.host.runner_handle import RunnerHandle
from ndif.host.runner_protocol import (
    UNLIMITED,
    FrameLimits,
    RunnerProtocol,
    check_size,
    largest_form,
    steps_of,
)
from ndif.runtime.messages import (
    Error,
    Message,
    Returned,
    Run,
    RunReport,
    Signal,
    Spill,
    Spilled,
)
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status
from ndif.schema.step import Step
from ndif.stores.broker import Broker, BrokerError, ClientLeftError
from ndif.stores.objects import ObjectStore, Upload
from ndif.stores.objects.port import result_key
from ndif.telemetry.steps import current, step

logger = logging.getLogger(__name__)

EXIT_PATIENCE_S = 1.0
_SLACK = 1 << 20
"""Bytes that a streamed frame may have beyond the largest message of a client, for its envelope."""

_DONE = "Your job has been completed."


class Execution:
    """The instructions to a replica's runners, and the storage of their results."""

    def __init__(self, settings: Settings, broker: Broker, objects: ObjectStore) -> None:
        self.broker = broker
        self.objects = objects
        self.limits = FrameLimits(
            settings.max_log_bytes,
            settings.max_log_lines_per_s,
            settings.max_streamed_bytes,
            # A hybrid job may send its client as much as the client may send back.
            max(settings.max_inline_result_bytes, settings.socketio_max_http_buffer_size) + _SLACK,
        )
        self._settings = settings

    def instructions(self, request: Request, size: int = 0) -> Run:
        """Return the order to run a request; `size`: bytes of its payload in a shared frame."""
        # Clients of the headers wire load a result from its frame without decompressing it.
        loaded_from_frame = request.subscription_id is not None and request.wire is Wire.HEADERS
        return Run(
            compressed=request.compress,
            env=dict(request.env),
            max_payload=self._settings.max_request_bytes,
            max_result=self.largest_result(request),
            max_inline=self._settings.max_inline_result_bytes,
            compress_inline=request.compress and not loaded_from_frame,
            nearby=request.nearby,
            size=size,
        )

    def largest_result(self, request: Request) -> int:
        """Return the most bytes of a request's result: the smaller limit of its server and its key."""
        largest = self._settings.largest_result(trusted=request.trusted)
        return min(largest, request.max_result_bytes or largest)

    def limits_of(self, request: Request) -> FrameLimits:
        """Return the limits of the data that a request may send its user."""
        return replace(
            self.limits,
            result_bytes=self.largest_result(request),
            inline_bytes=self._settings.max_inline_result_bytes,
        )

    async def completed(
        self, request: Request, body: bytes, compressed: bool, cost: Mapping[str, float]
    ) -> Response:
        """Return the response with a result that came in a frame; store it for a client that polls."""
        if request.subscription_id is None:
            with step("store"):
                await self.objects.put(result_key(request.id), body)
            return self.stored(request, cost, len(body))
        result = InlineResult(body, compressed)
        return Response(request.id, Status.COMPLETED, _DONE, result, cost, len(body))

    def stored(self, request: Request, cost: Mapping[str, float], size: int) -> Response:
        """Return the response that refers to a result in the object store."""
        # A live client fetches its result once; a client that polls may fetch it any number of times.
        once = request.subscription_id is not None
        result = StoredResult(
            self.objects.url(result_key(request.id), request.base_url, once=once), size
        )
        return Response(request.id, Status.COMPLETED, _DONE, result, cost, size)

    async def refusal(self, request: Request, size: int) -> Response | None:
        """Return an error if the object store has no room for an untrusted user's result, else None."""
        if request.trusted:
            return None
        why = await self.objects.room.admit(
            request.id, request.user, size, request.max_stored_bytes
        )
        return None if why is None else Response(request.id, Status.ERROR, why)


class Exchange:
    """One request on one runner, from its instructions to its result.

    `RequestRun` chooses and replaces runners.
    """

    def __init__(
        self,
        execution: Execution,
        request: Request,
        runner: RunnerHandle,
        respond: Respond,
        memory_bytes: int = UNLIMITED,
    ) -> None:
        """Prepare an exchange; `memory_bytes`: most memory that an untrusted run can have taken."""
        self.has_begun = False
        """True once the runner has reported an update, so that the block has begun."""
        self._execution = execution
        self._request = request
        self._runner = runner
        self._respond = respond
        self._memory_bytes = UNLIMITED if request.trusted else memory_bytes
        self._upload: Upload | None = None
        self._clock: RunClock | None = None
        self._is_admitted = self._is_stored = False

    async def run(self) -> Response | None:
        """Return the terminal response; None if the runner ends without one.

        Raise the errors of `RunnerProtocol.accept`.
        """
        execution, request, runner = self._execution, self._request, self._runner
        protocol = RunnerProtocol(
            execution.limits_of(request),
            is_hybrid=request.wire is Wire.HEADERS,
            has_live_client=request.subscription_id is not None,
        )
        until_begun: asyncio.Task[None] | None = None
        try:
            with step("payload"):
                payload = await execution.broker.payload(request)
            until_begun = runner.kill_if_frozen()
            self._clock = RunClock(self._memory_bytes)
            with step("send"):
                await runner.send(execution.instructions(request), payload)
            async for message, body in runner.frames(protocol.max_body_bytes):
                protocol.accept(message, body)
                if message is Signal.RUNNING:
                    until_begun.cancel()  # a block may sleep
                    # An untrusted runner may compute before it reports this, if an earlier request of its
                    # key controls it.
                    if request.trusted:
                        self._clock = RunClock()
                if isinstance(message, Returned | Spilled | Error):
                    return await self._finish(message, body, self._clock)
                if not await self._handle(message, body):
                    break
            return None
        finally:
            if until_begun is not None:
                until_begun.cancel()
            if self._upload is not None:
                self._upload.discard()
            if self._is_admitted:
                execution.objects.room.settle(request.id, stored=self._is_stored)

    @property
    def ran_s(self) -> float:
        """Return the seconds since an untrusted runner got the request; 0 of a trusted one."""
        return 0.0 if self._clock is None or self._request.trusted else self._clock.elapsed_s

    async def _handle(self, message: Message, body: bytes) -> bool:
        """Act on a runner's frame; return False if the runner ends meanwhile."""
        execution, runner = self._execution, self._runner
        match message:
            case Signal.RUNNING:
                await self._report(Status.RUNNING, "Your job has started running.")
            case Signal.LOG:
                await self._report(Status.LOG, body.decode(errors="replace"))
            case Signal.STREAM:
                await self._report(Status.STREAM, data=body)
            case Signal.AWAIT_UPLOAD:
                uploaded = execution.broker.uploaded(self._request)
                content = await runner.unless_ended(uploaded)
                if content is None:
                    return False
                await runner.send(Signal.UPLOAD, content)
            case Spill(size):
                created = execution.objects.create_for(size)
                self._upload = await runner.unless_ended(created)
                if self._upload is None:
                    return False
                await runner.send(Signal.FILE, fds=[self._upload.fileno()])
        return True

    async def _report(self, status: Status, text: str = "", data: bytes | None = None) -> None:
        """Report to the client until the run is cut short; a client that does not read delays its job."""
        self.has_begun = True
        update = Response(self._request.id, status, text, data=data)
        await self._runner.unless_cut(self._respond(update))

    async def _finish(
        self, message: Returned | Spilled | Error, body: bytes, clock: RunClock
    ) -> Response | None:
        """Return the terminal response for a runner's last message."""
        request = self._request
        match message:
            case Returned(compressed, report):
                # A client that polls gets its result from the object store, which must have room.
                if request.subscription_id is None and (refused := await self._admit(len(body))):
                    return refused
                cost = clock.cost(report)
                response = await self._execution.completed(request, body, compressed, cost)
                self._is_stored = True
                return response
            case Spilled(report):
                return await self._store(clock, report)
            case Error(report, ends):
                if ends:
                    self._runner.kill()  # the runner must not serve another request
                text, cost = body.decode(errors="replace"), clock.cost(report)
                return Response(request.id, Status.ERROR, text, meta=cost)

    async def _store(self, clock: RunClock, report: RunReport) -> Response | None:
        """Store the file that the runner has written, and return the response with its address."""
        upload, request = self._upload, self._request
        if upload is None:
            return None
        # The user must not get a file that the runner can still write to.
        if not request.trusted and not upload.seal():
            self._runner.kill()
            await self._runner.exit_code(EXIT_PATIENCE_S)
        cost = clock.cost(report)
        written = os.fstat(upload.fileno()).st_size
        check_size(written, largest_form(self._execution.largest_result(request)))
        if refused := await self._admit(written):
            return refused
        with step("store"):
            size = await upload.commit(result_key(request.id))
        self._is_stored = True
        return self._execution.stored(request, cost, size)

    async def _admit(self, size: int) -> Response | None:
        """Return an error if the object store has no room for the result, else None."""
        if refused := await self._execution.refusal(self._request, size):
            return refused
        self._is_admitted = not self._request.trusted
        return None


class RunClock:
    """The times of one run by the clocks of this process, which no block can set."""

    def __init__(self, memory_bytes: int = UNLIMITED) -> None:
        """Start now; `memory_bytes`: most memory that the run can have taken."""
        self._began, self._began_unix = time.perf_counter(), time.time()
        self._memory_bytes = memory_bytes

    @property
    def elapsed_s(self) -> float:
        """Return the seconds until now."""
        return round(time.perf_counter() - self._began, 6)

    def cost(self, report: RunReport) -> dict[str, float]:
        """Return the run's reported memory and its seconds until now, and record its reported steps."""
        if (recorder := current()) is not None:
            for reported in self.steps(report):
                recorder.record(reported)
        return self.measured(report)

    def measured(self, report: RunReport) -> dict[str, float]:
        """Return the run's reported memory and its seconds until now."""
        peak_memory = min(report.peak_memory, self._memory_bytes)
        return {"execution_time": self.elapsed_s, "peak_memory": peak_memory}

    def steps(self, report: RunReport) -> list[Step]:
        """Return the run's reported steps."""
        return steps_of(report, self._began_unix, time.time())


def announcement(request: Request) -> Response:
    """Return the DISPATCHED update of a request."""
    return Response(request.id, Status.DISPATCHED, "Your job has been sent to a replica.")


async def announce(request: Request, respond: Respond) -> None:
    """Report DISPATCHED to a client, or raise a `ClientLeftError` if its live client has left."""
    try:
        is_delivered = await respond(announcement(request))
    except BrokerError as error:
        # The broker is unavailable, so the client may still be connected: the job runs unannounced.
        logger.warning("request %s: %s", request.id, error)
        return
    if not is_delivered:
        raise ClientLeftError
