"""One request on one runner: instructions to the runner, updates from it, and the way of the result."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ndif.config.settings import Settings
from ndif.host.port import Respond
from ndif.host.runner_handle import RunnerHandle
from ndif.host.runner_protocol import (
    Limits,
    RunnerProtocol,
    TogetherProtocol,
    steps_of,
)
from ndif.runtime.messages import (
    AnswersTogether,
    Error,
    Returned,
    Run,
    RunReport,
    RunTogether,
    Signal,
    Spill,
    Spilled,
)
from ndif.schema.payload import Payload, PayloadFile
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
SLACK = 1 << 20
"""Bytes that a frame or a file may have beyond the largest result, for its envelope."""

_DONE = "Your job has been completed."


class Execution:
    """Run requests on the runners that a caller provides.

    Reads the payload from the broker, relays updates, and stores a result or passes it on. `RequestRun`
    seeks and replaces runners.
    """

    def __init__(self, settings: Settings, broker: Broker, objects: ObjectStore) -> None:
        self._settings = settings
        self._broker = broker
        self._objects = objects
        self._limits = Limits(
            settings.max_log_bytes,
            settings.max_log_lines_per_s,
            settings.max_streamed_bytes,
            # A hybrid job may send its client as much as that may send back.
            max(settings.max_inline_result_bytes, settings.socketio_max_http_buffer_size) + SLACK,
        )

    async def run(
        self, request: Request, runner: RunnerHandle, respond: Respond
    ) -> Response | None:
        """Run a request and return its terminal response; None if the runner ends without one.

        The errors of `RunnerProtocol.accept` are raised.
        """
        upload: Upload | None = None
        protocol = RunnerProtocol(
            self._limits,
            is_hybrid=request.wire is Wire.HEADERS,
            has_live_client=request.subscription_id is not None,
        )
        until_begun: asyncio.Task[None] | None = None
        clock = _Clock()
        admitted = is_stored = False
        try:
            with step("payload"):
                payload = await self._broker.payload(request)
            until_begun = runner.kill_if_frozen()
            with step("send"):
                await runner.send(self._instructions(request), payload)
            async for message, body in runner.frames(protocol.max_body_bytes):
                protocol.accept(message, body)
                match message:
                    case Signal.RUNNING:
                        until_begun.cancel()  # a block may sleep
                        clock = _Clock()
                        started = "Your job has started running."
                        await respond(Response(request.id, Status.RUNNING, started))
                    case Signal.LOG:
                        line = body.decode(errors="replace")
                        await respond(Response(request.id, Status.LOG, line))
                    case Signal.STREAM:
                        await respond(Response(request.id, Status.STREAM, data=body))
                    case Signal.AWAIT_UPLOAD:
                        content = await runner.unless_ended(self._broker.uploaded(request))
                        if content is None:
                            break
                        await runner.send(Signal.UPLOAD, content)
                    case Spill(size):
                        upload = await runner.unless_ended(self._objects.create_for(size))
                        if upload is None:
                            break
                        await runner.send(Signal.FILE, fds=[upload.fileno()])
                    case Returned(compressed, report):
                        if request.subscription_id is None:  # a client that polls
                            if refused := await self._refusal(request, len(body)):
                                return refused
                            admitted = not request.trusted
                        cost = clock.cost(report)
                        response = await self._completed(request, body, compressed, cost)
                        is_stored = True
                        return response
                    case Spilled(report) if upload is not None:
                        # The user must not get a file that the runner can still write to.
                        if not request.trusted and not upload.seal():
                            runner.kill()
                            await runner.exit_code(EXIT_PATIENCE_S)
                        cost = clock.cost(report)
                        size = os.fstat(upload.fileno()).st_size
                        if refused := await self._refusal(request, size):
                            return refused
                        admitted = not request.trusted
                        with step("store"):
                            size = await upload.commit(result_key(request.id))
                        is_stored = True
                        return self._stored(request, cost, size)
                    case Error(report, ends):
                        if ends:
                            runner.kill()  # no other request may be given this runner
                        text = body.decode(errors="replace")
                        return Response(request.id, Status.ERROR, text, meta=clock.cost(report))
            return None
        finally:
            if until_begun is not None:
                until_begun.cancel()
            if upload is not None:
                upload.discard()
            if admitted:
                self._objects.room.settle(request.id, stored=is_stored)

    async def run_together(
        self, requests: Sequence[Request], runner: RunnerHandle
    ) -> list[Response | None]:
        """Run trusted requests in one forward pass and return their responses.

        None stands for one that has to run alone; so do all of them if the runner ends.
        """
        payloads = [_in_memory(await self._broker.payload(request)) for request in requests]
        protocol = TogetherProtocol(len(requests) * self._limits.frame_bytes)
        clock = _Clock()
        until_begun = runner.kill_if_frozen()
        try:
            runs = [
                self._instructions(request, len(payload))
                for request, payload in zip(requests, payloads, strict=True)
            ]
            await runner.send(RunTogether(tuple(runs)), b"".join(payloads))
            async for message, body in runner.frames(protocol.max_body_bytes):
                protocol.accept(message)
                if isinstance(message, AnswersTogether):
                    return await self._answers(requests, message, body, clock)
                if message is Signal.RUNNING:
                    until_begun.cancel()
                    clock = _Clock()
        finally:
            until_begun.cancel()
        return [None] * len(requests)

    async def _answers(
        self, requests: Sequence[Request], message: AnswersTogether, body: bytes, clock: _Clock
    ) -> list[Response | None]:
        cost, steps = clock.measured(message.report), tuple(clock.steps(message.report))
        found: list[Response | None] = []
        start = 0
        for request, answer in zip(requests, message.answers, strict=True):
            if answer is None:
                found.append(None)
                continue
            content = body[start : start + answer.size]
            start += answer.size
            response = await self._completed(request, content, answer.compressed, cost)
            found.append(replace(response, steps=steps))
        return found

    async def _completed(
        self, request: Request, body: bytes, compressed: bool, cost: Mapping[str, float]
    ) -> Response:
        """Return the response with a result that came in a frame; for a client that polls, store it."""
        if request.subscription_id is None:
            with step("store"):
                await self._objects.put(result_key(request.id), body)
            return self._stored(request, cost, len(body))
        result = InlineResult(body, compressed)
        return Response(request.id, Status.COMPLETED, _DONE, result, cost, len(body))

    async def _refusal(self, request: Request, size: int) -> Response | None:
        """Return the error for an untrusted user whose result there is no room for."""
        if request.trusted:
            return None
        why = await self._objects.room.admit(
            request.id, request.user, size, request.max_stored_bytes
        )
        return None if why is None else Response(request.id, Status.ERROR, why)

    def _instructions(self, request: Request, size: int = 0) -> Run:
        # Clients of that wire load a result straight out of its frame, without decompressing it.
        loaded_from_frame = request.subscription_id is not None and request.wire is Wire.HEADERS
        largest = self._settings.largest_result(trusted=request.trusted)
        return Run(
            compressed=request.compress,
            env=dict(request.env),
            max_payload=self._settings.max_request_bytes,
            max_result=min(largest, request.max_result_bytes or largest),
            max_inline=self._settings.max_inline_result_bytes,
            compress_inline=request.compress and not loaded_from_frame,
            nearby=request.nearby,
            size=size,
        )

    def _stored(self, request: Request, cost: Mapping[str, float], size: int) -> Response:
        # A live client fetches its result once; a client that polls may fetch it any number of times.
        once = request.subscription_id is not None
        result = StoredResult(
            self._objects.url(result_key(request.id), request.base_url, once=once), size
        )
        return Response(request.id, Status.COMPLETED, _DONE, result, cost, size)


def _in_memory(payload: Payload) -> bytes:
    """Return a payload that shares a frame with others; of one in a file, nothing: it has one alone."""
    return b"" if isinstance(payload, PayloadFile) else bytes(payload)


class _Clock:
    """The time of one run, by this process's clocks, which no block can set."""

    def __init__(self) -> None:
        self._began, self._moment = time.perf_counter(), time.time()

    def cost(self, report: RunReport) -> dict[str, float]:
        """Return the run's reported memory and its seconds until now, and record its reported steps."""
        if (recorded := current()) is not None:
            for each in self.steps(report):
                recorded.note(each)
        return self.measured(report)

    def measured(self, report: RunReport) -> dict[str, float]:
        """Return the run's reported memory and its seconds until now."""
        elapsed_s = round(time.perf_counter() - self._began, 6)
        return {"execution_time": elapsed_s, "peak_memory": report.peak_memory}

    def steps(self, report: RunReport) -> list[Step]:
        """Return the run's reported steps."""
        return steps_of(report, self._moment, time.time())


def announcement(request: Request) -> Response:
    """Return the DISPATCHED update of a request."""
    return Response(request.id, Status.DISPATCHED, "Your job has been sent to a replica.")


async def announce(request: Request, respond: Respond) -> None:
    """Tell a client that its job was sent, or raise a `ClientLeftError` if the live client is not there."""
    try:
        heard = await respond(announcement(request))
    except BrokerError as error:
        # The broker is away, so nothing is known of the client: the job runs unannounced.
        logger.warning("request %s: %s", request.id, error)
        return
    if not heard:
        raise ClientLeftError
