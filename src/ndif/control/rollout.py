"""Rollouts: replacement of a model's replicas with replicas that have new settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ndif.cluster.controller import OPERATOR_PREFIX, Controller
from ndif.cluster.controller_types import ProvisionResult, ReplicaRequest
from ndif.cluster.models import Model
from ndif.cluster.replica import DeploymentError, Replica
from ndif.placement.replica import ReplicaKey
from ndif.queue.dispatcher import Dispatcher
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey
from ndif.schema.states import DeploymentLevel
from ndif.tasks import end, start

logger = logging.getLogger(__name__)

_WHY = f"{OPERATOR_PREFIX}deploys it with other settings"
_FAILED = f"{OPERATOR_PREFIX}reverts settings that failed"
_LOST = "A replica was lost while it was loaded."


@dataclass(frozen=True, slots=True)
class RolledOut:
    """The result of a rollout for one generation."""

    request: ReplicaRequest
    result: ProvisionResult
    is_down: bool = False
    """True if no replica serves for a time, because old and new replicas did not fit at once."""
    down_s: float | None = None
    """Seconds without a serving replica: expected, or measured once the rollout ends; None if unknown."""


@dataclass(eq=False)
class Rollouts:
    """Replaces the replicas of models; a model has one rollout at a time.

    If old and new replicas fit at once, the old replicas serve until the new ones do. Otherwise the old
    replicas are evicted first. If a new replica cannot be loaded, the model returns to its old settings,
    with its old replicas or equal ones. Waiting requests stay in the queue throughout.
    """

    controller: Controller
    dispatcher: Dispatcher
    _tasks: set[asyncio.Task[list[RolledOut]]] = field(default_factory=set, init=False)
    _locks: defaultdict[ModelKey, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock), init=False
    )

    async def roll_out(
        self, model: Model, config: DeploymentConfig, generations: Sequence[str], *, wait: bool
    ) -> list[RolledOut]:
        """Give a model new settings, and replace its replicas with new ones in these generations.

        Return once the new replicas are placed, or with `wait` once they serve or have failed. The rollout
        continues if the caller is cancelled.
        """
        placed: asyncio.Future[list[RolledOut]] = asyncio.get_running_loop().create_future()
        work = self._roll_out(model, config, generations, placed)
        task = start(work, self._tasks, f"rollout of {config.repo_id}")
        if wait:
            return await asyncio.shield(task)
        await asyncio.wait([task, placed], return_when=asyncio.FIRST_COMPLETED)
        return placed.result() if placed.done() else task.result()

    async def stop(self) -> None:
        """Cancel every rollout."""
        await end(self._tasks)

    async def _roll_out(
        self,
        model: Model,
        config: DeploymentConfig,
        generations: Sequence[str],
        placed: asyncio.Future[list[RolledOut]],
    ) -> list[RolledOut]:
        model.deploying += 1
        try:
            async with self._locks[model.key]:
                rollout = _Rollout(self.controller, self.dispatcher, model, config, generations)
                with rollout.holding():
                    return await rollout.run(placed)
        finally:
            model.deploying -= 1


class _Rollout:
    """One rollout and the model's previous state, which is restored if the rollout fails."""

    def __init__(
        self,
        controller: Controller,
        dispatcher: Dispatcher,
        model: Model,
        config: DeploymentConfig,
        generations: Sequence[str],
    ) -> None:
        self._controller = controller
        self._model = model
        self._config = config
        self._generations = generations
        self._before = model.config, model.generations
        self._withdrawals = model.withdrawals
        # An evicted replica may still finish its last requests, but has no place in the cluster.
        own_replicas = [
            replica
            for replica in controller.replicas()
            if replica.model is model and controller.cluster.find(replica.placed.key) is not None
        ]
        self._serving = [replica for replica in own_replicas if replica.serving]
        """Old replicas that serve; if memory suffices, they stay until the new replicas serve."""
        self._others = [replica for replica in own_replicas if not replica.serving]
        self._counts = Counter(
            replica.generation
            for replica in own_replicas
            if replica.placed.level is DeploymentLevel.HOT
        )
        self._processors = {
            generation: dispatcher.processor(model, generation)
            for generation in {*self._counts, *generations}
        }
        self._scales = {
            generation: (processor.least_replicas, processor.desired_replicas)
            for generation, processor in self._processors.items()
        }

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the model's requests in the queue until the end of the block, even without replicas."""
        with contextlib.ExitStack() as holds:
            for processor in self._processors.values():
                holds.enter_context(processor.holding())
            yield

    async def run(self, placed: asyncio.Future[list[RolledOut]]) -> list[RolledOut]:
        """Roll out and return the results; set the result of `placed` once the new replicas are placed."""
        model, loop = self._model, asyncio.get_running_loop()
        model.config, model.on_demand = self._config, False
        model.generations |= {*self._generations}
        requests = [
            ReplicaRequest(model, generation, self._config.replicas)
            for generation in self._generations
        ]
        evicted = self._evict(self._others, _WHY)
        provided = await self._controller.deploy_beside(requests) if self._serving else None
        down_since = down_s = None
        if provided is None:
            if self._serving:
                down_since = loop.time()
                down_s = max(model.load_s.values(), default=None)
                logger.warning(
                    "%s does not serve until it is loaded with its new settings", self._name
                )
            evicted += self._evict(self._serving, _WHY)
            provided = await self._controller.deploy(requests)
        results = [
            RolledOut(request, _with_evictions(result, evicted), down_since is not None, down_s)
            for request, result in zip(requests, provided, strict=True)
        ]
        for outcome in results:
            self._adopt(outcome.request, outcome.result)
        self._controller.dedicate(model)
        if not placed.done():
            placed.set_result(results)
        results = [replace(outcome, result=await self._until_up(outcome)) for outcome in results]
        if down_since is not None:
            took_s = loop.time() - down_since
            results = [replace(outcome, down_s=took_s) for outcome in results]
        if self._is_overtaken:
            return results
        failed = next(
            (outcome.result.problem for outcome in results if outcome.result.problem), None
        )
        if failed is not None:
            await self._roll_back(results)
            reason = failed.removesuffix(".")  # a library's message may have no full stop
            sentence = f"{reason}. {await self._restore()}"
            return [
                replace(outcome, result=replace(outcome.result, replica_ids=(), problem=sentence))
                for outcome in results
            ]
        if down_since is None:
            evicted_last = self._evict(self._serving, _WHY)
            results = [
                replace(outcome, result=_with_evictions(outcome.result, evicted_last))
                for outcome in results
            ]
        self._controller.dedicate(model)
        return results

    @property
    def _name(self) -> str:
        return self._model.config.repo_id

    @property
    def _is_overtaken(self) -> bool:
        """True if an operator has since evicted the model, or it turned out to be another model."""
        return self._model.withdrawals > self._withdrawals or self._model.same_as is not None

    def _evict(self, replicas: Sequence[Replica], why: str) -> tuple[ReplicaKey, ...]:
        keys = [replica.placed.key for replica in replicas]
        return self._controller.evict(replica_keys=keys, cold=True, why=why) if keys else ()

    def _adopt(self, request: ReplicaRequest, result: ProvisionResult) -> None:
        processor = self._processors[request.generation]
        processor.least_replicas = processor.desired_replicas = request.replicas
        processor.adopt(result.replica_ids)

    async def _until_up(self, placed: RolledOut) -> ProvisionResult:
        """Wait until each placed replica serves or fails; return the serving ones and the last problem."""
        request, result = placed.request, placed.result
        up, problem = [], result.problem
        for replica_id in result.replica_ids:
            replica = self._controller.replica(request.variant, replica_id)
            try:
                if replica is not None:
                    await replica.up()
                    up.append(replica_id)
            except DeploymentError as error:
                problem = str(error)
        if len(up) < len(result.replica_ids) and problem is None:
            problem = request.model.problems.get(request.generation, _LOST)
        return replace(result, replica_ids=tuple(up), problem=problem)

    async def _roll_back(self, results: Sequence[RolledOut]) -> None:
        """Evict the new replicas and restore the model's old settings."""
        new = [
            (str(outcome.request.variant), replica_id)
            for outcome in results
            for replica_id in outcome.result.replica_ids
        ]
        if new:
            self._controller.evict(replica_keys=new, cold=True, why=_FAILED)
        self._model.config, self._model.generations = self._before
        for generation, processor in self._processors.items():
            processor.least_replicas, processor.desired_replicas = self._scales[generation]
            self._model.problems.pop(generation, None)

    async def _restore(self) -> str:
        """Load missing old replicas again; return the outcome as a sentence."""
        cluster = self._controller.cluster
        serving = Counter(
            replica.generation
            for replica in self._serving
            if replica.serving and cluster.find(replica.placed.key) is not None
        )
        requests = [
            ReplicaRequest(self._model, generation, count)
            for generation, count in self._counts.items()
            if serving[generation] < count
        ]
        if not requests:
            self._controller.dedicate(self._model)
            return f"{self._name!r} continues to serve with its previous settings."
        provided = await self._controller.deploy(requests)
        for request, result in zip(requests, provided, strict=True):
            self._adopt(request, result)
        self._controller.dedicate(self._model)
        results = [
            await self._until_up(RolledOut(request, result))
            for request, result in zip(requests, provided, strict=True)
        ]
        failed = next((result.problem for result in results if result.problem), None)
        if failed is None:
            return f"{self._name!r} was loaded again with its previous settings."
        return f"It could not be loaded again with its previous settings: {failed}"


def _with_evictions(result: ProvisionResult, evicted: Sequence[ReplicaKey]) -> ProvisionResult:
    return replace(result, evicted=tuple(dict.fromkeys((*evicted, *result.evicted))))
