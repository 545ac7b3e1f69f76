"""Scaling: how many replicas each line is to have, by what has been seen of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from ndif.queue.autoscale import Autoscaler, Bounds, Observation, median_wait
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor
from ndif.schema.variant import Variant


class Scaling:
    """An autoscaler for each line; what it wants is asked for, or let go."""

    def __init__(
        self, dispatcher: Dispatcher, bounds: Bounds, now: Callable[[], float] = time.time
    ) -> None:
        """`bounds`: those of every model for which its operator has not said others."""
        self._dispatcher = dispatcher
        self._bounds = bounds
        self._now = now
        self._scalers: dict[Variant, Autoscaler] = {}

    async def step(self) -> None:
        """Look at every line once."""
        processors = self._dispatcher.processors
        for gone in self._scalers.keys() - processors.keys():
            del self._scalers[gone]
        for variant, processor in list(processors.items()):
            await self._step(self._scaler(variant, processor), processor)

    def _scaler(self, variant: Variant, processor: Processor) -> Autoscaler:
        least = processor.least_replicas
        most = max(processor.model.wanted.max_replicas or self._bounds.most, least)
        scaler = self._scalers.get(variant)
        if scaler is None or (scaler.bounds.least, scaler.bounds.most) != (least, most):
            # It is new, or its operator has said something: what was learnt holds no longer.
            bounds = replace(self._bounds, least=least, most=most)
            scaler = self._scalers[variant] = Autoscaler(bounds, least)
        return scaler

    async def _step(self, scaler: Autoscaler, processor: Processor) -> None:
        most = processor.since_last_seen()
        at_rest = processor.desired_replicas == processor.least_replicas == scaler.state.wanted
        if at_rest and not most.waiting and not processor.line:
            return  # nothing that an autoscaler could do: most are so at most times
        observation = Observation(
            replicas=processor.replicas.serving,
            busy=most.running,
            waiting=most.waiting,
            waited_s=median_wait((entry.what.received for entry in processor.line), self._now()),
            refused=most.refused,
        )
        wanted = scaler.step(observation, asyncio.get_running_loop().time())
        if wanted > processor.desired_replicas and len(processor.replicas):
            processor.add_replicas(wanted)
        elif wanted < processor.desired_replicas and most.refused:
            # No reason to end those that are still on their way.
            processor.desired_replicas = wanted
        elif wanted < processor.desired_replicas:
            processor.scale(wanted)
