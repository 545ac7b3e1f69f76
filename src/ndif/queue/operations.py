"""Operations: what an operator asks of the running server, whoever passes it on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ndif.cluster.asking import Asked, Provided
from ndif.cluster.controller import Controller
from ndif.cluster.hosted import DeploymentError
from ndif.cluster.level import DeploymentLevel
from ndif.cluster.models import Model
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.overview import queue_of, status_of
from ndif.queue.processor import Processor
from ndif.queue.upkeep import Upkeep
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_entry import entry_of
from ndif.schema.operation import OperationError
from ndif.schema.variant import Variant

_EVICTED = "The server's operator has taken {} off the server."
_HOT = DeploymentLevel.HOT
_KILLED = "The server's operator has ended this job."

_Gone = tuple[str, str | None]
"""Model key and replica id of what was evicted; no id where it had yet to have a replica."""


class Operations:
    """Deploy, evict, scale, restart, kill; and what there is to be seen."""

    def __init__(
        self,
        controller: Controller,
        dispatcher: Dispatcher,
        upkeep: Upkeep,
        generations: Callable[[], Sequence[str]],
        stop: Callable[[], None],
    ) -> None:
        """`generations`: those that are installed, the newest first."""
        self._controller = controller
        self._dispatcher = dispatcher
        self._upkeep = upkeep
        self._generations = generations
        self._stop = stop

    async def deploy(
        self,
        configs: Sequence[DeploymentConfig],
        generation: str | None,
        *,
        wait: bool,
        sync: bool,
    ) -> list[dict[str, Any]]:
        """Deploy the models; with `sync`, evict what is deployed and not among them.

        With `wait` it returns when every replica is ready or has failed.

        Raises:
            OperationError: if a generation is not installed.
        """
        configs = [self._controller.models.as_known(config) for config in configs]
        chosen = [self._chosen(config, generation) for config in configs]
        changed = [
            known
            for config in configs
            if (known := self._controller.models.find(config.key)) is not None
            and known.config.as_loaded != config.as_loaded
        ]
        models = [self._controller.models.put(config) for config in configs]
        others = [m for m in self._controller.models if m not in models and m.booked is None]
        gone: list[_Gone] = []
        for other in others if sync else ():
            gone += await self._evict(other, cold=False)
        if stale := [h.deployment.key for h in self._controller.replicas() if h.model in changed]:
            why = "it is deployed with other settings"
            gone += self._controller.evict(replica_keys=stale, cold=True, why=why)
        asked = []
        # Two names may mean one model: the last holds.
        pairs = {
            (id(model), runtime): model
            for model, runtimes in zip(models, chosen, strict=True)
            for runtime in runtimes
        }
        for (_, runtime), model in pairs.items():
            model.generations |= {runtime}
            processor = self._dispatcher.processor(model, runtime)
            processor.least_replicas = model.wanted.replicas
            processor.scale(model.wanted.replicas)
            asked.append(Asked(model, runtime, model.wanted.replicas))
            self._controller.dedicate(model)
        told = await self._provide(asked, wait=wait, gone=gone)
        for place, one in enumerate(asked):
            if one.model.same_as is not None:  # which is known only now
                as_that = [one.model.config]
                (told[place],) = await self.deploy(as_that, one.generation, wait=wait, sync=False)
        return told

    async def evict(
        self, model: str, replica_id: str | None, *, cold: bool
    ) -> list[dict[str, Any]]:
        """Take a model, or one replica of it, off its devices; `cold`: out of the memory as well.

        Raises:
            OperationError: if there is no such model or replica, or the calendar has it there now.
        """
        models = self._called(model)
        self._not_booked(models, replica_id)
        if replica_id is None:
            gone = [key for one in models for key in await self._evict(one, cold=cold)]
        else:
            keys = [
                hosted.deployment.key
                for hosted in self._controller.replicas()
                if hosted.model in models and hosted.deployment.replica_id == replica_id
            ]
            if not keys:
                raise OperationError(404, f"{model!r} has no replica {replica_id!r}.")
            hot = {d.key for d in self._controller.cluster.replicas() if d.level is _HOT}
            for variant in {Variant.parse(key[0]) for key in keys if key in hot}:
                processor = self._dispatcher.processors.get(variant)
                if processor is not None:
                    processor.desired_replicas = max(0, processor.desired_replicas - 1)
                    processor.least_replicas = min(
                        processor.least_replicas, processor.desired_replicas
                    )
                    if processor.model.keeps(variant.generation):
                        processor.model.scale(variant.generation, processor.least_replicas)
            gone = list(self._controller.evict(replica_keys=keys, cold=cold))
        if not gone:
            raise OperationError(404, f"{model!r} has no replica to evict.")
        return [_named(key) for key in gone]

    async def scale(
        self, model: str, replicas: int, generation: str | None
    ) -> list[dict[str, Any]]:
        """Have as many replicas of a model.

        Raises:
            OperationError: if there is no such model, the generation is not installed, or the calendar
                has the model there now.
        """
        asked: list[Asked] = []
        told: list[dict[str, Any]] = []
        models = self._called(model)
        self._not_booked(models)
        for one in models:
            runtimes = self._scaled(one, replicas, generation)
            if not replicas and generation is None:
                one.config = replace(one.config, replicas=0)
                one.withdrawals += 1  # what has yet to have a place is not wanted either
            for runtime in sorted(runtimes):
                if replicas or (generation is not None and one.keeps(runtime)):
                    one.scale(runtime, replicas)
                processor = self._dispatcher.processor(one, runtime)
                processor.least_replicas = replicas
                gone = processor.scale(replicas)
                if replicas:
                    asked.append(Asked(one, runtime, replicas))
                else:
                    told.append(_told(Asked(one, runtime, 0), Provided(), gone))
        return told or await self._provide(asked, wait=False)

    async def restart(self, model: str) -> list[dict[str, Any]]:
        """Start a model's replicas anew.

        Raises:
            OperationError: if there is no such model, or it has no replica.
        """
        models = self._called(model)
        there = [h for h in self._controller.replicas() if h.model in models]
        if not there:
            raise OperationError(404, f"{model!r} has no replica to restart.")
        hot = [hosted for hosted in there if hosted.deployment.level is _HOT]
        # Where none is on its device, one is to be: what is only in memory was kept to return.
        anew = hot or list({hosted.deployment.model_key: hosted for hosted in there}.values())
        counts: dict[Processor, int] = {}
        for hosted in anew:
            variant = Variant.parse(hosted.deployment.model_key)
            processor = self._dispatcher.processor(hosted.model, variant.generation)
            counts[processor] = counts.get(processor, 0) + 1
        keys = [hosted.deployment.key for hosted in there]
        self._controller.evict(replica_keys=keys, cold=True, why="its operator restarts it")
        asked = [processor.asked(count) for processor, count in counts.items()]
        told = await self._provide([each[0] for each in asked], wait=False)
        told += await self._provide([each[1] for each in asked if each[1:]], wait=False)
        if problems := [one["problem"] for one in told if one["problem"]]:
            raise OperationError(409, problems[0])
        return [_named(hosted.deployment.key) for hosted in anew]

    async def kill(self, request_id: str) -> bool:
        """End a request that waits or runs; False if none of that id does."""
        return await self._dispatcher.cancel(request_id, _KILLED)

    async def status(self) -> dict[str, Any]:
        """Nodes, models, replicas, schedule."""
        return {
            **status_of(self._controller, self._dispatcher),
            "schedule": self._upkeep.describe_schedule(),
        }

    async def queue(self) -> dict[str, Any]:
        """What runs and waits, model by model."""
        return queue_of(self._dispatcher)

    async def export(self) -> list[dict[str, Any]]:
        """Entries of a deployment file that brings up what is deployed now."""
        # What is leaving is there still, and decided not to be.
        serving = {d.key for d in self._controller.cluster.replicas() if d.level is _HOT}
        hot = {id(h.model) for h in self._controller.replicas() if h.deployment.key in serving}
        entries = []
        for model in self._controller.models:
            replicas = self._asked_for(model)
            # One that its operator wants none of is there for users alone, as any is on demand.
            dedicated = model.config.dedicated and replicas > 0
            if id(model) in hot or dedicated:
                entries.append(entry_of(self._as_it_is(model, max(1, replicas), dedicated)))
        return entries

    async def stop(self) -> None:
        """End the server as SIGTERM does."""
        self._stop()

    def _as_it_is(self, model: Model, replicas: int, dedicated: bool) -> DeploymentConfig:
        most = model.config.max_replicas
        usual = {model.config.runtime or next(iter(self._generations()), None)}
        return replace(
            model.config,
            replicas=replicas,
            max_replicas=None if most is None else max(most, replicas),
            dedicated=dedicated,
            generations=() if model.generations <= usual else tuple(sorted(model.generations)),
        )

    def _asked_for(self, model: Model) -> int:
        """How many replicas its operator wants, of whichever generation that is the most."""
        asked = [p.least_replicas for p in self._lines(model) if model.keeps(p.variant.generation)]
        return max(asked, default=0) or model.config.replicas

    def _lines(self, model: Model) -> list[Processor]:
        return [p for p in self._dispatcher.processors.values() if p.model is model]

    def _scaled(self, model: Model, replicas: int, generation: str | None) -> set[str]:
        """Which generations it means that a model is to have so many replicas."""
        lines = self._lines(model)
        known = {line.variant.generation for line in lines}
        if generation is not None:
            return {self._generation(generation)}
        if replicas:
            # Those of its operator; else those that are there; or what users had last.
            there = {line.variant.generation for line in lines if not line.idle}
            known = set(model.generations) or there or known
        return known or {self._generation(model.wanted.runtime)}

    async def _evict(self, model: Model, *, cold: bool) -> list[_Gone]:
        """Take all of a model away, and tell those who wait for it."""
        model.config = replace(model.config, dedicated=False)
        coming = set(map(str, self._controller.undecided(model)))
        model.withdrawals += 1
        model.generations = frozenset()
        processors = self._lines(model)
        for processor in processors:
            if await processor.dismiss(_EVICTED.format(repr(model.config.repo_id))):
                coming.add(str(processor.variant))
        variants = [processor.variant for processor in processors]
        gone = self._controller.evict(variants, cold=cold)
        without = coming - {model_key for model_key, _ in gone}
        return [*gone, *((model_key, None) for model_key in sorted(without))]

    async def _provide(
        self, asked: Sequence[Asked], *, wait: bool, gone: Sequence[_Gone] = ()
    ) -> list[dict[str, Any]]:
        """Have what is asked for; `gone` went before it."""
        provided = await self._controller.deploy(asked) if asked else []
        for one, what in zip(asked, provided, strict=True):
            self._dispatcher.processor(one.model, one.generation).adopt(what.replica_ids)
        if wait:
            await asyncio.gather(
                *(self._settled(one, what) for one, what in zip(asked, provided, strict=True))
            )
        return [_told(one, what, gone) for one, what in zip(asked, provided, strict=True)]

    async def _settled(self, asked: Asked, provided: Provided) -> None:
        """Return when all that was provided is ready or has failed."""
        for replica_id in provided.replica_ids:
            hosted = self._controller.hosted(asked.variant, replica_id)
            if hosted is not None:
                with contextlib.suppress(DeploymentError):
                    await hosted.up()

    def _called(self, name: str) -> list[Model]:
        try:
            models = self._controller.models.called(name)
        except ValueError as error:
            raise OperationError(400, str(error)) from error
        if not models:
            known = ", ".join(sorted({m.config.repo_id for m in self._controller.models}))
            raise OperationError(
                404,
                f"There is no model {name[:200]!r} on this server"
                + (f"; there is {known}." if known else ", nor any other."),
            )
        return models

    def _not_booked(self, models: Sequence[Model], replica_id: str | None = None) -> None:
        """Refuse what would not hold: the calendar has as many there as it says.

        Raises:
            OperationError: if it has one of these models, or this replica of one.
        """
        for hosted in self._controller.replicas() if replica_id is not None else ():
            if hosted.deployment.replica_id == replica_id and not hosted.deployment.dedicated:
                return  # one more than it wants
        for model in models:
            if model.booked is None:
                continue
            until = self._upkeep.booked_until(model)
            when = f"until {until:%Y-%m-%d %H:%M} {until.tzname()}" if until else "now"
            raise OperationError(
                409,
                f"The calendar has {model.config.repo_id!r} on this server {when}, with "
                f"{model.booked.replicas} replica{'s' * (model.booked.replicas != 1)}: until then only a "
                "change of the calendar changes that.",
            )

    def _chosen(self, config: DeploymentConfig, generation: str | None) -> list[str]:
        """The generations to deploy it for: the one that is said beside it, or those of its own."""
        said = (generation,) if generation is not None else config.deployed_for
        return [self._generation(each) for each in said or (None,)]

    def _generation(self, generation: str | None) -> str:
        installed = self._generations()
        if generation is None and installed:
            return installed[0]
        if generation not in installed:
            raise OperationError(
                400,
                f"nnsight {generation} is not installed here; {', '.join(installed) or 'none'} is. "
                f"`ndif runtime add {generation}` adds it.",
            )
        return str(generation)


def _named(key: _Gone) -> dict[str, Any]:
    return {"model_key": key[0], "replica_id": key[1]}


def _told(asked: Asked, provided: Provided, gone: Sequence[_Gone]) -> dict[str, Any]:
    evicted = dict.fromkeys((*gone, *provided.evicted))
    return {
        "repo_id": asked.model.config.repo_id,
        "generation": asked.generation,
        "replicas": list(provided.replica_ids),
        "evicted": [{"model": model, "replica_id": replica} for model, replica in evicted],
        "problem": provided.problem or _failure(asked),
    }


def _failure(asked: Asked) -> str | None:
    """What has become of the replicas that it was given, where that is of interest still."""
    if asked.withdrawn or not asked.replicas:
        return None
    return asked.model.problems.get(asked.generation)
