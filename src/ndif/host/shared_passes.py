"""Forward passes that trusted requests share on one replica.

`ModelActor.shared_passes` is None where each request runs alone, `ndif.queue.sharing` chooses the
requests, and `ndif.runtime.generations.co_batch_nnsight08` runs them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from ndif.host.channel import ProtocolError
from ndif.host.execution import RunClock
from ndif.host.request_run import RequestRun
from ndif.host.runner_handle import RunnerHandle
from ndif.host.runner_protocol import BEFORE_RUN, check_size
from ndif.runtime.messages import (
    InlineAnswer,
    Message,
    SharedRunOrder,
    SharedRunResults,
    Signal,
    kind_of,
)
from ndif.schema.payload import Payload, PayloadFile
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker import BrokerError
from ndif.stores.objects import ObjectStoreError

logger = logging.getLogger(__name__)

_PASS_S = 60.0
"""Seconds after which a shared forward pass is given up and its requests run alone."""
_RESULTS = frozenset({"shared run results"})


class SharedRun(RequestRun):
    """One run of several trusted requests in one forward pass."""

    async def run_together(self, requests: Sequence[Request]) -> list[Response | None]:
        """Return the responses; see `SharedPasses.run`."""
        # A block that does not end meets its own time limit when it runs alone.
        limit_s = min(_PASS_S, self._timeout_s)
        with self._limited(limit_s, lambda: self.cancel("it takes long")):
            runner = await self._acquire(requests[0])
            if runner is None:
                return [None] * len(requests)
            async with self._serving(runner, requests[0]):
                try:
                    responses = await self._exchange(requests, runner)
                except (ProtocolError, ObjectStoreError, BrokerError) as error:
                    logger.warning("%d requests run alone: %s", len(requests), error)
                    return [None] * len(requests)
                self._answered = runner.usable
                return responses

    async def _exchange(
        self, requests: Sequence[Request], runner: RunnerHandle
    ) -> list[Response | None]:
        """Send requests to a runner and return their responses, all None if the runner ends."""
        execution = self._tools.execution
        payloads = [_in_memory(await execution.broker.payload(request)) for request in requests]
        protocol = SharedRunProtocol(len(requests) * execution.limits.frame_bytes)
        clock = RunClock()
        until_begun = runner.kill_if_frozen()
        try:
            runs = [
                execution.instructions(request, len(payload))
                for request, payload in zip(requests, payloads, strict=True)
            ]
            await runner.send(SharedRunOrder(tuple(runs)), b"".join(payloads))
            async for message, body in runner.frames(protocol.max_body_bytes):
                protocol.accept(message)
                if isinstance(message, SharedRunResults):
                    return await self._responses(requests, message, body, clock)
                if message is Signal.RUNNING:
                    until_begun.cancel()
                    clock = RunClock()
        finally:
            until_begun.cancel()
        return [None] * len(requests)

    async def _responses(
        self, requests: Sequence[Request], message: SharedRunResults, body: bytes, clock: RunClock
    ) -> list[Response | None]:
        cost, steps = clock.measured(message.report), tuple(clock.steps(message.report))
        execution = self._tools.execution
        largest = [execution.limits_of(request).returned_bytes for request in requests]
        responses: list[Response | None] = []
        contents = contents_of(message.answers, body, largest)
        for request, answer, content in zip(requests, message.answers, contents, strict=True):
            if answer is None:
                responses.append(None)
                continue
            response = await execution.completed(request, content, answer.compressed, cost)
            responses.append(replace(response, steps=steps))
        return responses


@dataclass(frozen=True, slots=True)
class LocalSharedPasses:
    """`SharedPasses` of a replica on this machine."""

    most: int
    """See `SharedPasses.most`."""
    begin: Callable[[], AbstractContextManager[SharedRun]]
    """Begin a run on the replica."""

    async def run(self, requests: Sequence[Request]) -> list[Response | None]:
        with self.begin() as run:
            return await run.run_together(requests)


class SharedRunProtocol:
    """A checker of the frames of several trusted requests in one forward pass."""

    def __init__(self, frame_bytes: int) -> None:
        """Start in the state before a run; `frame_bytes` limits all results together."""
        self._frame_bytes = frame_bytes
        self._expected = BEFORE_RUN

    def max_body_bytes(self, message: Message) -> int:
        """Return the largest body, in bytes, that a frame with this message may have."""
        return self._frame_bytes if kind_of(message) in _RESULTS else 0

    def accept(self, message: Message) -> None:
        """Check a frame, or raise a `ProtocolError` if it may not be sent now."""
        if kind_of(message) not in self._expected:
            raise ProtocolError(f"a frame {kind_of(message)!r} is not allowed in this state")
        if message is Signal.RUNNING:
            self._expected = _RESULTS


def contents_of(
    answers: Sequence[InlineAnswer | None], body: bytes, largest: Sequence[int]
) -> list[bytes]:
    """Return each request's part of a body, empty without an answer; `largest` are its most bytes.

    Raise a `ProtocolError` unless the answers fit the requests, their limits and the body.
    """
    if len(answers) != len(largest):
        raise ProtocolError(f"a frame has {len(answers)} results for {len(largest)} requests")
    sizes = [0 if answer is None else answer.size for answer in answers]
    if sum(sizes) != len(body):
        raise ProtocolError("a frame has results whose sizes are not the size of its body")
    for size, limit in zip(sizes, largest, strict=True):
        check_size(size, limit)
    starts = itertools.accumulate(sizes, initial=0)
    return [body[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _in_memory(payload: Payload) -> bytes:
    """Return a payload for a shared frame; empty for a payload in a file, which cannot share a frame."""
    return b"" if isinstance(payload, PayloadFile) else bytes(payload)
