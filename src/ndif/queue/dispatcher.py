"""Dispatcher: takes each request from the broker to the processor of its model (section 4.1)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from ndif.cluster.asking import Living
from ndif.cluster.controller import Controller
from ndif.cluster.deployment import ReplicaKey
from ndif.cluster.level import DeploymentLevel
from ndif.cluster.models import Model, NotServedError
from ndif.queue.processor import Customs, Processor
from ndif.queue.responder import Responder
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.variant import Variant
from ndif.stores.broker import Broker
from ndif.tasks import within

logger = logging.getLogger(__name__)

_DISMISSED_WITHIN_S = 5.0


class Dispatcher:
    """One processor for each model in each runtime, made when its first request comes."""

    def __init__(
        self,
        controller: Controller,
        broker: Broker,
        responder: Responder,
        customs: Customs | None = None,
    ) -> None:
        self.processors: dict[Variant, Processor] = {}
        self._controller = controller
        self._broker = broker
        self._responder = responder
        self._customs = customs or Customs()
        self._tasks: dict[Variant, asyncio.Task[None]] = {}
        self._dispatching: asyncio.Task[None] | None = None
        controller.on_leave = self._leaving

    def start(self) -> None:
        """Begin to dispatch."""
        self._dispatching = asyncio.create_task(self._dispatch_forever(), name="dispatcher")

    async def dismiss(self, reason: str) -> None:
        """End every request: nobody will bring it to its end later."""
        processors = list(self.processors.values())
        for processor in processors:
            await processor.dismiss(reason)
            for run in processor.replicas.runs:
                await processor.cancel(run.entry.id, reason)
        ending = [run for processor in processors for run in processor.replicas.runs]
        with contextlib.suppress(asyncio.TimeoutError):
            await within(asyncio.gather(*(run.over.wait() for run in ending)), _DISMISSED_WITHIN_S)

    async def stop(self) -> None:
        """Stop dispatching; what runs is abandoned."""
        tasks = [*self._tasks.values(), *([self._dispatching] if self._dispatching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def processor(self, model: Model, generation: str) -> Processor:
        """The processor of a model in a runtime."""
        variant = Variant(model.key, generation)
        processor = self.processors.get(variant)
        if processor is None:
            processor = Processor(
                model, generation, self._controller, self._broker, self._responder, self._customs
            )
            processor.put_in_line = self.put_in_line
            self.processors[variant] = processor
            self._tasks[variant] = asyncio.create_task(processor.run(), name=f"line of {variant}")
        return processor

    async def tell_everybody(self, text: str) -> None:
        """Tell all those who wait."""
        for processor in list(self.processors.values()):
            await processor.tell_everybody(text)

    def adopt(self, found: Sequence[Living]) -> None:
        """Serve with replicas that another leader left."""
        for hosted in self._controller.adopt(found):
            place = hosted.deployment
            if place.level is DeploymentLevel.HOT:
                generation = Variant.parse(place.model_key).generation
                self.processor(hosted.model, generation).adopt([place.replica_id])

    async def cancel(self, request_id: str, reason: str) -> bool:
        """End a request wherever it is; whether there was one."""
        for processor in list(self.processors.values()):
            if await processor.cancel(request_id, reason):
                return True
        return False

    def forget_idle(self) -> None:
        """Keep no line that only a user asked for, and that has neither work nor replicas.

        It is that of a model, or of a model's further generation.
        """
        there = {hosted.deployment.model_key for hosted in self._controller.replicas()}
        for variant, processor in list(self.processors.items()):
            model = processor.model
            is_users = model.forgettable or not model.keeps(variant.generation)
            if not is_users or not processor.idle or str(variant) in there:
                continue
            self._tasks.pop(variant).cancel()
            del self.processors[variant]
            model.problems.pop(variant.generation, None)
            if not any(other.model is model for other in self.processors.values()):
                self._controller.models.forget(model)

    async def _dispatch_forever(self) -> None:
        while True:
            await self.put_in_line(await self._broker.claim())

    async def put_in_line(self, request: Request) -> None:
        """Put a request in the line of its model, or say why there is none."""
        try:
            await self._dispatch(request)
        except Exception:
            # A defect of ours, or a store that fails, must cost one request.
            logger.exception("request %s could not be put in its line", request.id)
            await self._broker.release(request)

    async def _dispatch(self, request: Request) -> None:
        try:
            # It was admitted when it came; since then its model may have been forgotten.
            model = self._controller.models.admit(request.model, hotswapping=request.hotswapping)
        except NotServedError as error:
            await self._responder.respond(request, Response(request.id, Status.ERROR, str(error)))
            return
        await self.processor(model, request.generation).enqueue(request)

    def _leaving(self, key: ReplicaKey, why: str) -> None:
        model_key, replica_id = key
        processor = self.processors.get(Variant.parse(model_key))
        if processor is not None:
            processor.remove_replica(replica_id, why)
