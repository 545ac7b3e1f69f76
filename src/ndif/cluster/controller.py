"""Controller: decides which replicas exist, and carries it out (specification, sections 5.1 and 5.6).

What is decided is `cluster`, a value; what is done about it is on its way there. Decisions follow each
other at once. What they ask of a node is done in their order, so that nothing begins to use memory before
who had it has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from ndif.cluster.adoption import adopt
from ndif.cluster.asking import Asked, Discover, Evaluate, Leaving, Living, MakeActor, Provided
from ndif.cluster.cluster import Cluster, Decision
from ndif.cluster.delta import DeploymentDelta, build
from ndif.cluster.deployment import Deployment, ReplicaKey
from ndif.cluster.device_errors import MOST, WITHIN_S, DeviceErrors, Withdrawal
from ndif.cluster.hosted import DeploymentError, EvictedError, Hosted, Lease
from ndif.cluster.level import DeploymentLevel
from ndif.cluster.models import Model, Models
from ndif.cluster.rules import DEFAULT_RULES, Rules
from ndif.cluster.wanted import Device, Wanted
from ndif.cluster.why import why_not
from ndif.host.device_errors import DeviceFailure
from ndif.host.port import ActorError, DeviceError
from ndif.schema.variant import Variant
from ndif.tasks import end, within

logger = logging.getLogger(__name__)

_CACHE_PATIENCE_S = 600.0
"""A replica that takes longer to leave its device is ended: others wait for it."""


_WITHDRAWN = "its operator evicted it before it had a place"


class Controller:
    """Holds the cluster, and an actor for each replica in it."""

    def __init__(
        self,
        models: Models,
        make_actor: MakeActor,
        evaluate: Evaluate,
        discover: Discover,
        *,
        rules: Rules = DEFAULT_RULES,
        drain_s: float = 60.0,
        now: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        places: bool = True,
    ) -> None:
        """`drain_s`: how long a replica that has to go may run on what it is running.

        `places`: whether models go where there is room, or where their options say, whatever the books
        hold.
        """
        self.models = models
        self.cluster = Cluster()
        self.on_leave: Leaving = lambda key, why: None
        self.on_up: Callable[[Hosted], None] = lambda hosted: None
        """Told of each replica that begins to serve."""
        self._make_actor = make_actor
        self._evaluate = evaluate
        self._discover = discover
        self._rules = rules
        self._places = places
        self._drain_s = drain_s
        self._now = now
        self._rng = rng or random.Random()  # noqa: S311 - ties, not secrets
        self._hosted: dict[ReplicaKey, Hosted] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        """Those of them that nothing may cut short: a process would be left."""
        self._sizes: dict[Variant, int] = {}
        self._device_errors = DeviceErrors()
        self._withdrawn: dict[str, Withdrawal] = {}
        self._asked: list[Asked] = []

    # What there is

    def hosted(self, variant: Variant, replica_id: str) -> Hosted | None:
        """A replica that exists, or is coming."""
        return self._hosted.get((str(variant), replica_id))

    def replicas(self) -> list[Hosted]:
        """Every replica that exists, or is coming."""
        return list(self._hosted.values())

    def size_of(self, variant: Variant) -> int | None:
        """The bytes of one replica, where they are known."""
        return self._sizes.get(variant)

    def undecided(self, model: Model) -> set[Variant]:
        """Those runtimes of a model that have been asked for, and have yet to be given a place."""
        return {one.variant for one in self._asked if one.model is model and not one.withdrawn}

    @property
    def connected(self) -> bool:
        """Whether some replica can run a request."""
        return any(hosted.serving for hosted in self._hosted.values())

    # What is asked of it

    async def discover(self) -> None:
        """Look at the machines, and take those that are new or gone into account."""
        nodes = await self._discover()
        found = self.cluster.with_nodes(nodes)  # and with what has come and gone meanwhile
        self.cluster = found.cluster
        self._withdraw()
        for node_id in found.removed:
            logger.warning("node %s is gone, and what was on it", node_id)
        for key in found.lost:
            self._put_away(key, EvictedError("its node is gone"))

    async def deploy(self, asked: Sequence[Asked]) -> list[Provided]:
        """Have what is asked for, as far as there is room; in one decision, so that the largest goes first.

        Whoever wants to run requests waits for `Hosted.up`. Of what is withdrawn meanwhile nothing comes.
        """
        for one in asked:
            one.model.deploying += 1
            self._asked.append(one)
        try:
            return await self._deploy(asked)
        finally:
            for one in asked:
                one.model.deploying -= 1
                self._asked.remove(one)

    async def _deploy(self, asked: Sequence[Asked]) -> list[Provided]:
        sizes = await asyncio.gather(*(self._size(one) for one in asked))
        problems = [size if isinstance(size, str) else None for size in sizes]
        decision = await self._decide(
            {one: size for one, size in zip(asked, sizes, strict=True) if isinstance(size, int)}
        )
        self._carry_out(decision, "another model needs its memory")
        refused = {refusal.model_key: why_not(refusal) for refusal in decision.refused}
        provided = []
        for one, problem in zip(asked, problems, strict=True):
            if one.void:
                why = _WITHDRAWN if one.withdrawn else None
                provided.append(Provided(problem=why, evicted=decision.evictions))
                continue
            variant = str(one.variant)
            problem = problem or refused.get(variant)
            one.model.problems.pop(one.generation, None)
            if problem is not None:
                one.model.problems[one.generation] = problem
            provided.append(Provided(decision.replica_ids(variant), problem, decision.evictions))
        return provided

    async def _decide(self, asked: Mapping[Asked, int]) -> Decision:
        """Who goes where; of those who have to leave for it, each has been of use before.

        Or else two models that displace each other would do nothing but that.
        """
        while True:
            wanted = [self._wanted(one, size) for one, size in asked.items() if not one.void]
            decision = self.cluster.deploy(wanted, self._now(), self._rng, self._rules)
            leaving = [self._hosted[key] for key in decision.evictions if key in self._hosted]
            early = [hosted for hosted in leaving if hosted.is_early]
            if not early or any(one.dedicated for one in wanted):
                return decision
            await asyncio.gather(*(hosted.of_use() for hosted in early))

    def _wanted(self, asked: Asked, size_bytes: int) -> Wanted:
        wanted = asked.wanted(size_bytes)
        return wanted if self._places else replace(wanted, device=Device.AUTO)

    def evict(
        self,
        variants: Iterable[Variant] = (),
        replica_keys: Iterable[ReplicaKey] = (),
        *,
        cold: bool = False,
        why: str = "its operator evicted it",
    ) -> tuple[ReplicaKey, ...]:
        """End the service of models or single replicas: which of them were HOT, or are there no longer."""
        to = DeploymentLevel.COLD if cold else DeploymentLevel.WARM
        before = {deployment.key for deployment in self.cluster.replicas()}
        decision = self.cluster.evict(map(str, variants), replica_keys, to)
        after = {deployment.key for deployment in decision.cluster.replicas()}
        gone = tuple(dict.fromkeys([*decision.evictions, *sorted(before - after)]))
        self._carry_out(decision, why)
        return gone

    def dedicate(self, model: Model) -> None:
        """Have as many of a model's replicas dedicated as its operator wants, and no others."""
        for variant in {hosted.deployment.model_key for hosted in self._of(model)}:
            replicas = model.dedicated_in(Variant.parse(variant).generation)
            self.cluster = self.cluster.with_dedicated(variant, replicas)
        self._take_over()

    def adopt(self, found: Sequence[Living]) -> list[Hosted]:
        """Take over replicas that another controller left, and end those that have no place here."""
        adoption = adopt(self.cluster, self.models, found)
        self.cluster = adoption.cluster
        for one in adoption.dropped:
            logger.warning("%s has no place here and is ended", one.deployment.name)
            self._end_aside(one.actor.stop(), one.deployment)
        adopted = [
            (Hosted(place, model, one.actor), one.is_loaded) for one, place, model in adoption.kept
        ]
        for hosted, is_loaded in adopted:
            self._hosted[hosted.deployment.key] = hosted
            name = hosted.deployment.name
            logger.info("%s is taken over", name)
            if not is_loaded:
                hosted.starting = self._spawn(self._create(hosted), name)
                continue
            hosted.came_up()
            hosted.was_of_use()
            self._learn(hosted)
            self._spawn(self._watch(hosted), f"watch over {name}")
        return [hosted for hosted, _ in adopted]

    async def leave(self) -> None:
        """Let go of every replica, for another controller to adopt; wait for those that are ending."""
        self.cluster = Cluster()
        await end(self._tasks - self._ends)
        await _all(*self._ends)
        self._hosted.clear()

    async def stop(self) -> None:
        """End every replica, and wait for those that are ending."""
        self.cluster = Cluster()  # nothing that is asked for from now on has a place
        await end(self._tasks - self._ends)
        await _all(*(hosted.actor.stop() for hosted in self._hosted.values()), *self._ends)
        self._hosted.clear()

    async def _size(self, asked: Asked) -> int | str:
        """The bytes of one replica, or why they cannot be told."""
        measured = None
        while measured is None:
            settings = asked.model.wanted
            try:
                measured = await self._evaluate(settings, asked.generation)
            except ActorError as error:
                return _not_loaded(asked.model, asked.generation, str(error))
            if asked.model.wanted != settings:
                measured = None  # it was deployed with others meanwhile
        self.models.learn(asked.model, measured.repo_id, measured.task)
        if not self._of(asked.model):
            self.models.unite(asked.model)
        self._sizes[asked.variant] = measured.size_bytes
        return measured.size_bytes

    # What is done about it

    def _carry_out(self, decision: Decision, why: str) -> None:
        delta = build(self.cluster, decision.cluster)
        coming = {
            deployment.key: self._host(
                deployment, self.models.of(Variant.parse(deployment.model_key).model)
            )
            for deployment in delta.to_create
        }
        for said in delta.steps(why):
            logger.info("%s", said)
        half = [d.key for d in delta.to_cache if not self._is_loaded(d.key)]
        # Half a model is nothing to keep warm, and nobody's to return.
        self.cluster = decision.cluster.without(half)
        self._hosted.update(coming)
        going = [*delta.to_delete, *delta.to_cache]
        leaving = {
            d.key: (hosted, hosted.lease)
            for d in going
            if (hosted := self._hosted.get(d.key)) is not None
        }
        for hosted, _ in leaving.values():
            hosted.was_of_use()  # whoever waits for its place has it
            if hosted.deployment.level is DeploymentLevel.HOT:
                self.on_leave(hosted.deployment.key, why)
            if not hosted.is_loaded:
                hosted.failed(EvictedError(why))  # nobody is to wait for what does not come
        for deployment in delta.from_cache:
            self._hosted[deployment.key].returns(deployment)
        self._take_over()
        for node_id, part in delta.by_node().items():
            self._spawn(self._apply(node_id, part, leaving), f"changes of {node_id}")

    def _host(self, deployment: Deployment, model: Model) -> Hosted:
        generation = Variant.parse(deployment.model_key).generation
        return Hosted(deployment, model, self._make_actor(model.wanted, generation, deployment))

    def _take_over(self) -> None:
        """Have each replica's place be as it was decided."""
        for decided in self.cluster.replicas():
            hosted = self._hosted.get(decided.key)
            if hosted is not None:
                hosted.deployment = decided

    async def _apply(
        self,
        node_id: str,
        delta: DeploymentDelta,
        leaving: Mapping[ReplicaKey, tuple[Hosted, Lease]],
    ) -> None:
        """Delete, cache, return, create: in this order, and after what was asked of the node before."""
        async with self._turns[node_id]:
            await _all(
                *(self._delete(*leaving[d.key]) for d in delta.to_delete if d.key in leaving),
                *(self._cache(*leaving[d.key]) for d in delta.to_cache if d.key in leaving),
            )
            await _all(*(self._return(d.key) for d in delta.from_cache))
            for deployment in delta.to_create:
                if (hosted := self._hosted.get(deployment.key)) is not None:
                    hosted.starting = self._spawn(self._create(hosted), hosted.deployment.name)

    async def _delete(self, hosted: Hosted, lease: Lease) -> None:
        await self._drain(lease)
        await self._end(hosted)

    async def _cache(self, hosted: Hosted, lease: Lease) -> None:
        await self._drain(lease)
        key = hosted.deployment.key
        if self.cluster.find(key) is not None and not hosted.actor.ended.is_set():
            try:
                await within(hosted.actor.to_cache(), _CACHE_PATIENCE_S)
            except Exception:
                logger.exception("%s could not be kept warm", hosted.deployment.name)
            else:
                return
        await self._end(hosted)
        self.cluster = self.cluster.without([key])

    def _is_loaded(self, key: ReplicaKey) -> bool:
        hosted = self._hosted.get(key)
        return hosted is not None and hosted.is_loaded

    async def _drain(self, lease: Lease) -> None:
        """Give those who run requests on it time to end: longer than that nobody else waits."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(lease.ended(), self._drain_s)

    async def _end(self, hosted: Hosted) -> None:
        hosted.is_ending = True
        if hosted.starting is not None:
            hosted.starting.cancel()
        await hosted.actor.stop()
        hosted.failed(EvictedError("it was evicted before it could serve"))
        if self._hosted.get(hosted.deployment.key) is hosted:
            del self._hosted[hosted.deployment.key]

    async def _return(self, key: ReplicaKey) -> None:
        hosted = self._hosted.get(key)
        if hosted is not None:
            memory = hosted.deployment.gpu_mem_bytes_by_id
            await self._bring_up(hosted, hosted.actor.from_cache(memory))

    async def _create(self, hosted: Hosted) -> None:
        await self._bring_up(hosted, hosted.actor.start(hosted.progressed))
        if hosted.is_loaded:
            self._spawn(self._watch(hosted), f"watch over {hosted.deployment.name}")

    async def _bring_up(self, hosted: Hosted, coming: Awaitable[None]) -> None:
        try:
            await coming
            self._came_up(hosted)
        except ActorError as error:
            if isinstance(error, DeviceError):
                self._failed_on(hosted, error.failure)
            await self._look_again()  # a model does not answer for a node that is gone
            if not hosted.is_ending and self._hosted.get(hosted.deployment.key) is hosted:
                await self._fail(hosted, str(error))
        except Exception:
            # A defect of ours must not leave it on its way for ever.
            logger.exception("%s could not be brought up", hosted.deployment.name)
            await self._fail(hosted, "the server failed; its log says why")

    def _came_up(self, hosted: Hosted) -> None:
        """From now on it serves: the time for which it is protected begins."""
        key = hosted.deployment.key
        self._learn(hosted)
        self.cluster = self.cluster.with_deployed(key, self._now())
        self._take_over()
        logger.info("%s is ready", hosted.deployment.name)
        hosted.model.problems.pop(Variant.parse(hosted.deployment.model_key).generation, None)
        self.on_up(hosted)
        hosted.came_up()

    def _learn(self, hosted: Hosted) -> None:
        loaded = hosted.actor.model
        self.models.learn(hosted.model, loaded.get("repo_id"), loaded.get("task"))

    async def _fail(self, hosted: Hosted, why: str) -> None:
        generation = Variant.parse(hosted.deployment.model_key).generation
        sentence = _not_loaded(hosted.model, generation, why)
        logger.error("%s", sentence)
        hosted.model.problems[generation] = sentence
        await hosted.actor.stop()
        self._forget(hosted.deployment.key, DeploymentError(sentence))

    async def _watch(self, hosted: Hosted) -> None:
        await hosted.actor.ended.wait()
        if (failure := hosted.actor.device_failure) is not None:
            self._failed_on(hosted, failure)
        await self._look_again()  # or else its place would be taken on a node that is gone
        self.lost(hosted)

    def _failed_on(self, hosted: Hosted, failure: DeviceFailure) -> None:
        """Note which GPU a replica was lost to: any of its own, where that is not said."""
        place = hosted.deployment
        node = self.cluster.nodes.get(place.node_id)
        if node is None:
            return
        of_it = [index for index in place.gpu_mem_bytes_by_id if failure.gpu in (None, index)]
        names = [node.gpu_name(index) for index in of_it]
        if not names:
            return
        self._device_errors = self._device_errors.noted(names, failure.error, self._now())
        logger.error("%s was lost to %s: %s", place.name, " or ".join(names), failure.error)
        self._withdraw()

    def _withdraw(self) -> None:
        """Withdraw those GPUs from placement that have failed of late, and no others."""
        self._withdrawn = self._device_errors.withdrawn(self._now())
        self.cluster = self.cluster.with_withdrawn(self._withdrawn.keys())

    def device_problems(self) -> list[str]:
        """Say which GPUs are out of placement, and why."""
        return [
            f"GPU {index} of {node.name} ({node.gpu_name(index)}) takes no model until "
            f"{datetime.fromtimestamp(out.until).astimezone():%H:%M}: replicas on it ended with "
            f"{MOST} CUDA errors within {WITHIN_S / 60:g} minutes, the last with {out.error!r}."
            for node in self.cluster.nodes.values()
            for index in sorted(node.resources.withdrawn)
            if (out := self._withdrawn.get(node.gpu_name(index))) is not None
        ]

    async def _look_again(self) -> None:
        try:
            await self.discover()
        except Exception:
            logger.exception("the machines could not be looked at")

    def lost(self, hosted: Hosted) -> None:
        """A replica turned out to run nothing more: nothing is left of it, and its place is free."""
        if self._hosted.get(hosted.deployment.key) is hosted:
            self._put_away(hosted.deployment.key, EvictedError("its process ended"))

    def _put_away(self, key: ReplicaKey, why: DeploymentError) -> None:
        """Have nothing left of a replica that is of no use; who gets its place waits for that."""
        if (hosted := self._hosted.get(key)) is not None:
            self._end_aside(self._end(hosted), hosted.deployment)
        self._forget(key, why)

    def _end_aside(self, ending: Awaitable[None], place: Deployment) -> None:
        task = self._spawn(ending, f"end of {place.name}")
        self._ends.add(task)
        self._spawn(self._wait_for(task, place.node_id), f"place of {place.name}")

    async def _wait_for(self, end: asyncio.Task[None], node_id: str) -> None:
        """Have what is asked of a node from now on done after this."""
        async with self._turns[node_id]:
            await asyncio.wait([end])

    def _forget(self, key: ReplicaKey, why: DeploymentError) -> None:
        hosted = self._hosted.pop(key, None)
        self.cluster = self.cluster.without([key])
        if hosted is not None:
            has_served = not hosted.is_pending
            hosted.failed(why)
            if has_served:  # else whoever waits for it hears so
                self.on_leave(key, str(why))

    def _of(self, model: Model) -> list[Hosted]:
        return [hosted for hosted in self._hosted.values() if hosted.model is model]

    def _spawn(self, work: Awaitable[None], name: str) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)  # noqa: S101 - a coroutine's
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._ends.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=defect)


async def _all(*work: Awaitable[None]) -> None:
    """Do all of it, whatever becomes of a part."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, Exception):
            logger.error("a change of a replica failed", exc_info=outcome)


def _not_loaded(model: Model, generation: str, why: str) -> str:
    return f"{model.config.repo_id!r} could not be loaded for nnsight {generation}: {why}"
