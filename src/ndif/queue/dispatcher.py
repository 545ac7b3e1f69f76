"""Dispatch of requests from the broker to their models' queues, and a holding queue without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import OrphanReplica
from ndif.cluster.models import Model, NotServedError
from ndif.host.job import Job
from ndif.placement.replica import ReplicaKey
from ndif.queue.lifecycle import QueueLifecycle
from ndif.queue.processor import Processor, QueuePolicy
from ndif.schema.model_key import Variant
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.states import DeploymentLevel
from ndif.schema.status import Status
from ndif.stores.broker import Broker
from ndif.stores.responder import Responder, StoredResponse
from ndif.tasks import end, within

logger = logging.getLogger(__name__)

_ENDED_WITHIN_S = 5.0
_AT_ONCE = 8
"""Requests of a key that are cancelled concurrently."""


class Dispatcher:
    """Claims requests from the broker and puts each into the queue of its model and generation.

    Owns one `Processor` per model and generation, made when its first request comes, and the
    `QueueLifecycle` of every request that it claimed. The processors handle scheduling and replicas.
    """

    def __init__(
        self,
        controller: Controller,
        broker: Broker,
        responder: Responder,
        policy: QueuePolicy | None = None,
    ) -> None:
        self.processors: dict[Variant, Processor] = {}
        self._controller = controller
        self._broker = broker
        self._policy = policy or QueuePolicy()
        self.lifecycle = QueueLifecycle(
            broker, responder, self._policy.max_attempts, self._on_client_left
        )
        self._cancelled_keys: dict[str, tuple[float, str]] = {}
        """Reasons to end further requests, by API key, each until an event-loop time."""
        self._tasks: dict[Variant, asyncio.Task[None]] = {}
        self._claiming: asyncio.Task[None] | None = None
        controller.on_leave(self._on_replica_left)

    def start(self) -> None:
        """Claim requests from now on."""
        self._claiming = asyncio.create_task(self._claim_forever(), name="dispatcher")

    async def fail_all(self, reason: str) -> None:
        """End every request as an ERROR that no later process will run."""
        for processor in list(self.processors.values()):
            await processor.fail_waiting(reason, unless=self._broker.outlives)
        held = [request for request in self.lifecycle.held if not self._broker.outlives(request)]
        for request in held:
            self.lifecycle.cancel(request.id, reason)
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self.lifecycle.until_over(held), _ENDED_WITHIN_S)

    async def stop(self) -> None:
        """Stop dispatching; running requests are abandoned."""
        await end([*self._tasks.values(), *([self._claiming] if self._claiming else [])])
        await self.lifecycle.stop()

    def processor(self, model: Model, generation: str) -> Processor:
        """Return the processor of a model and generation; make it if there is none."""
        variant = Variant(model.key, generation)
        processor = self.processors.get(variant)
        if processor is None:
            processor = Processor(
                model, generation, self._controller, self.lifecycle, self._policy, self.enqueue
            )
            self.processors[variant] = processor
            self._tasks[variant] = asyncio.create_task(processor.run(), name=f"queue of {variant}")
        return processor

    async def notify_waiting(self, text: str) -> None:
        """Notify all waiting clients."""
        for processor in list(self.processors.values()):
            await processor.notify_waiting(text)

    def adopt(self, orphans: Sequence[OrphanReplica]) -> None:
        """Serve requests with replicas that another leader left."""
        for replica in self._controller.adopt(orphans):
            place = replica.placed
            if place.level is DeploymentLevel.HOT:
                generation = Variant.parse(place.model_key).generation
                self.processor(replica.model, generation).adopt([place.replica_id])

    async def cancel(self, request_id: str, reason: str) -> bool:
        """End a request as an ERROR, whether it waits or runs; return False if it is not held.

        When this returns, the request has ended, even if its replica does not answer. If it ends by itself
        before its replica is notified, it keeps that end, and this returns False.
        """
        for processor in self.processors.values():
            if (waiting := processor.queue.remove(request_id)) is not None:
                self.lifecycle.cancel(request_id, reason)  # for its record
                await self.lifecycle.fail(waiting, reason)
                return True
        if not self.lifecycle.cancel(request_id, reason):
            return False
        return await self.lifecycle.ensure_cancelled(request_id, _ENDED_WITHIN_S)

    async def cancel_all(self, key: str, reason: str, for_s: float = 0.0) -> int:
        """End every request of an API key as an ERROR, also requests that come within `for_s` seconds.

        Return the number of held requests that were ended.
        """
        self._cancelled_keys[key] = asyncio.get_running_loop().time() + for_s, reason
        held = [request.id for request in self.lifecycle.held if request.key == key]
        ended = 0
        for start in range(0, len(held), _AT_ONCE):
            cancelling = (
                self.cancel(request_id, reason) for request_id in held[start : start + _AT_ONCE]
            )
            for outcome in await asyncio.gather(*cancelling, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    logger.error("a request of a key could not be ended", exc_info=outcome)
                else:
                    ended += outcome
        return ended

    def _cancel_reason(self, key: str) -> str | None:
        """Return the reason to end a request of an API key that comes now; None if there is none."""
        until, reason = self._cancelled_keys.get(key, (0.0, ""))
        if not reason or asyncio.get_running_loop().time() < until:
            return reason or None
        del self._cancelled_keys[key]
        return None

    def holds(self, request_id: str) -> bool:
        """Return True if a request is held, or ended not long ago."""
        return self.lifecycle.holds(request_id)

    def update_of(self, request_id: str, *, is_stored: bool = True) -> StoredResponse | None:
        """Return an update newer than a request's stored one; None if there is none.

        A waiting request has one. A running request has one unless an update `is_stored`: stored updates
        expire while a job runs, or waits, for long.
        """
        for processor in self.processors.values():
            if (waiting := processor.update_of(request_id)) is not None:
                return StoredResponse.of(*waiting)
        job = None if is_stored else self.lifecycle.job(request_id)
        update = None if job is None else job.update()
        return None if job is None or update is None else StoredResponse.of(job.request, update)

    def forget_idle(self) -> None:
        """Drop idle processors that exist only because a user asked for them.

        Such a processor belongs to a model that no operator deployed, or to a further generation of a
        deployed model.
        """
        deployed = {replica.placed.model_key for replica in self._controller.replicas()}
        for variant, processor in list(self.processors.items()):
            model = processor.model
            is_user_requested = model.forgettable or not model.keeps(variant.generation)
            if not is_user_requested or not processor.idle or str(variant) in deployed:
                continue
            self._tasks.pop(variant).cancel()
            del self.processors[variant]
            model.problems.pop(variant.generation, None)
            if not any(other.model is model for other in self.processors.values()):
                self._controller.models.forget(model)

    async def _claim_forever(self) -> None:
        while True:
            await self.accept(await self._broker.claim())

    async def accept(self, request: Request) -> None:
        """Hold a request that the broker handed out, and put it into the queue of its model."""
        if (job := self.lifecycle.claim(request)) is None:
            return
        reason = (
            request.refusal or self._cancel_reason(request.key) or self.lifecycle.exhausted(job)
        )
        if not reason:
            await self.enqueue(job)
        else:
            await self.lifecycle.fail(job, reason)

    async def enqueue(self, job: Job) -> None:
        """Put a job into the queue of its model, or fail it if its model is not served."""
        request = job.request
        try:
            # The gateway admitted the request; since then its model may have been forgotten.
            model = self._controller.models.admit(
                request.model,
                request.generation,
                hotswapping=request.hotswapping,
                gated=request.gated,
            )
            await self.processor(model, request.generation).enqueue(job)
        except NotServedError as error:
            await self.lifecycle.fail(job, str(error))
        except Exception:
            # A defect of the server costs one request.
            logger.exception("request %s could not be put into its queue", request.id)
            reason = "The server failed before it ran this job; its log says why."
            await self.lifecycle.fail(job, reason)

    def _on_client_left(self, job: Job) -> None:
        any(processor.await_client_of(job) for processor in self.processors.values())

    def _on_replica_left(self, key: ReplicaKey, why: str) -> None:
        model_key, replica_id = key
        processor = self.processors.get(Variant.parse(model_key))
        if processor is not None:
            processor.remove_replica(replica_id, why)


@dataclass(eq=False)
class HoldingQueue:
    """A queue that holds requests, in order, while the cluster cannot be reached.

    Claims requests from the broker and reports to each client why its request waits. The dispatcher takes
    over the requests once the cluster is reached.
    """

    broker: Broker
    responder: Responder
    text: str
    """Text that each client gets."""
    _requests: list[Request] = field(default_factory=list, init=False)
    _claiming: asyncio.Task[None] | None = field(default=None, init=False)

    def open(self) -> None:
        """Claim requests from now on."""
        if self._claiming is None:
            self._claiming = asyncio.create_task(self._claim_forever(), name="holding queue")

    async def close(self) -> list[Request]:
        """Stop claiming; return the requests in the order they came."""
        if self._claiming is not None:
            await end([self._claiming])
        return self._requests

    async def _claim_forever(self) -> None:
        while True:
            request = await self.broker.claim()
            self._requests.append(request)
            try:
                await self.responder.respond(
                    request, Response(request.id, Status.QUEUED, self.text)
                )
            except Exception:
                # The request waits all the same.
                logger.exception(
                    "the client of request %s could not be notified that it waits", request.id
                )
