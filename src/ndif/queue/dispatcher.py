"""Dispatcher: takes each request from the broker to the processor of its model (section 4.1)."""

from __future__ import annotations

import asyncio

from ndif.cluster.controller import Controller
from ndif.config import Settings
from ndif.queue.processor import Processor
from ndif.queue.responder import Responder
from ndif.stores.broker import Broker


class Dispatcher:
    """One processor for each nnsight generation, made when its first request comes."""

    def __init__(
        self, controller: Controller, broker: Broker, responder: Responder, settings: Settings
    ) -> None:
        self.processors: dict[str, Processor] = {}
        self._controller = controller
        self._broker = broker
        self._responder = responder
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to dispatch."""
        self._tasks.append(asyncio.create_task(self._dispatch_forever(), name="dispatcher"))

    async def stop(self) -> None:
        """Stop dispatching; what runs is abandoned."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _dispatch_forever(self) -> None:
        while True:
            request = await self._broker.claim()
            await self._processor(request.generation).enqueue(request)

    def _processor(self, generation: str) -> Processor:
        processor = self.processors.get(generation)
        if processor is None:
            processor = Processor(
                generation,
                self._controller,
                self._broker,
                self._responder,
                self._settings.processor_reply_freq_s,
                self._settings.max_attempts,
            )
            self.processors[generation] = processor
            self._tasks.append(asyncio.create_task(processor.run(), name=f"processor {generation}"))
        return processor
