"""The controller: decides which replicas exist, and creates, moves and ends them.

`cluster` is the decided state, a value; the replicas follow it. Decisions take effect at once. Their
changes to a node are made in the order of the decisions, so that no replica takes memory before its former
owner has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import replace
from datetime import datetime
from typing import Any

from ndif.cluster.adoption import adopt
from ndif.cluster.controller_types import (
    Discover,
    Evaluate,
    Leaving,
    MakeActor,
    OrphanReplica,
    ProvisionResult,
    ReplicaRequest,
)
from ndif.cluster.models import Model, Models
from ndif.cluster.replica import DeploymentError, EvictedError, Lease, Replica
from ndif.config.units import format_duration
from ndif.host.device_errors import MOST, WITHIN_S, DeviceErrors, DeviceFailure, Withdrawal
from ndif.host.port import ActorError, FailedDeviceError
from ndif.placement.cluster import Cluster, Decision
from ndif.placement.delta import DeploymentDelta, build
from ndif.placement.demand import DEFAULT_RULES, Device, PlacementRules
from ndif.placement.node import Node
from ndif.placement.refusal import explain_refusal
from ndif.placement.replica import PlacedReplica, ReplicaKey
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey, Variant
from ndif.schema.server_state import Problem, ProblemKind
from ndif.schema.states import DeploymentLevel
from ndif.tasks import end, within
from ndif.telemetry import metrics

logger = logging.getLogger(__name__)

_CACHE_PATIENCE_S = 600.0
"""Seconds that a replica may take to leave its device before it is ended, because others wait."""
OPERATORS = "its operator "
"""Prefix of the reasons that an operator caused."""
_WITHDRAWN = f"{OPERATORS}evicted it before it had a place"


class Controller:
    """The owner of all replicas: keeps them as requests and operators demand, within the cluster's memory.

    Owns the decided `Cluster` and a `Replica` with its actor for each place in it. Gets machines and actors
    from a fleet, and sizes from an evaluator. The processors run the requests, and wait for `Replica.up`.
    """

    def __init__(
        self,
        models: Models,
        make_actor: MakeActor,
        evaluate: Evaluate,
        discover: Discover,
        *,
        rules: PlacementRules = DEFAULT_RULES,
        now: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        uses_placement: bool = True,
    ) -> None:
        """Prepare a controller without machines; `discover` finds them.

        `rng` decides ties and ids. `uses_placement`: True to place models where there is room, False to
        follow their options.
        """
        self.models = models
        self._cluster = Cluster()
        self._leave_listeners: list[Leaving] = []
        self._up_listeners: list[Callable[[Replica], None]] = []
        self._make_actor = make_actor
        self._evaluate = evaluate
        self._discover = discover
        self._rules = rules
        self._uses_placement = uses_placement
        self._now = now
        self._rng = rng or random.Random()  # noqa: S311 - ties, not secrets
        self._replicas: dict[ReplicaKey, Replica] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        """Tasks that must run to their end, so that no process is left behind."""
        self._sizes: dict[Variant, int] = {}
        self._files_on: dict[ModelKey, frozenset[str]] = {}
        """Ids of the nodes to which a model was downloaded before it was placed."""
        self._device_errors = DeviceErrors()
        self._withdrawn: dict[str, Withdrawal] = {}
        self._asked: list[ReplicaRequest] = []

    # State

    @property
    def cluster(self) -> Cluster:
        """Return the decided state."""
        return self._cluster

    @cluster.setter
    def cluster(self, cluster: Cluster) -> None:
        self._cluster = cluster
        hot = {each.model_key for each in cluster.replicas() if each.level is DeploymentLevel.HOT}
        self.models.note_loaded(hot)

    def replica(self, variant: Variant, replica_id: str) -> Replica | None:
        """Return a replica that exists or is being created."""
        return self._replicas.get((str(variant), replica_id))

    def replicas(self) -> list[Replica]:
        """Return every replica that exists or is being created."""
        return list(self._replicas.values())

    def size_of(self, variant: Variant) -> int | None:
        """Return the bytes of one replica, if known."""
        return self._sizes.get(variant)

    def undecided(self, model: Model) -> set[Variant]:
        """Return the variants of a model that are requested and have no place yet."""
        return {one.variant for one in self._asked if one.model is model and not one.withdrawn}

    def on_leave(self, listener: Leaving) -> None:
        """Call `listener` for each replica that no longer serves."""
        self._leave_listeners.append(listener)

    def on_up(self, listener: Callable[[Replica], None]) -> None:
        """Call `listener` with each replica that begins to serve."""
        self._up_listeners.append(listener)

    def _notify_leaving(self, key: ReplicaKey, why: str) -> None:
        for listener in self._leave_listeners:
            listener(key, why)

    # Operations

    async def discover(self) -> None:
        """Find the machines, and record those that are new or gone."""
        nodes = await self._discover()
        found = self.cluster.with_nodes(nodes)  # as the cluster is after the wait
        self.cluster = found.cluster
        self._withdraw()
        for node_id in found.removed:
            logger.warning("node %s is gone with its replicas", node_id)
        for key in found.lost:
            self._drop_lost(key, EvictedError("its node is gone"))

    async def deploy(self, asked: Sequence[ReplicaRequest]) -> list[ProvisionResult]:
        """Create the requested replicas that fit, in one decision, so that the largest goes first.

        Returns before they are loaded: `Replica.up` waits for that. A request withdrawn meanwhile is void.
        """
        with self._asking(asked):
            return await self._deploy(asked)

    async def deploy_beside(self, asked: Sequence[ReplicaRequest]) -> list[ProvisionResult] | None:
        """Create the requested replicas in addition to existing ones, as `deploy` does.

        Return None, and create nothing, if that is not possible without evictions.
        """
        with self._asking(asked):
            sizes = await asyncio.gather(*(self._size(one) for one in asked))
            demands = []
            for one, size in zip(asked, sizes, strict=True):
                if isinstance(size, str) or one.void:
                    return None
                demand = one.demand(size, self._files_on.get(one.model.key, frozenset()))
                there = len(self.cluster.hot(demand.model_key))
                demands.append(replace(demand, replicas=one.replicas + there))
            decision = self.cluster.deploy(demands, self._now(), self._rng, self._rules)
            if decision.refused or decision.evictions:
                return None
            before = {placed.key for placed in self.cluster.replicas()}
            self._carry_out(decision, "")
            provided = []
            for demand in demands:
                found = decision.replica_ids(demand.model_key)
                new = tuple(each for each in found if (demand.model_key, each) not in before)
                provided.append(ProvisionResult(new))
            return provided

    async def check(
        self, config: DeploymentConfig, generation: str, gone: Collection[ReplicaKey] = ()
    ) -> str | None:
        """Return the reason why a model cannot be loaded with these settings; None if none is known.

        The model is measured, and needs a place in the cluster without the replicas `gone`.
        """
        model = Model(self._key(config.key), config)
        try:
            measured = await self._evaluate(config, generation)
        except ActorError as error:
            return _not_loaded(model, generation, str(error))
        cluster = self.cluster.without(gone)
        demand = ReplicaRequest(model, generation, config.replicas).demand(measured.size_bytes)
        if not self._uses_placement:
            demand = replace(demand, device=Device.AUTO)
        # A generator of its own, so that later decisions draw the same ties as without this one.
        rng = random.Random(0)  # noqa: S311 - ties, not secrets
        refused = cluster.deploy([demand], self._now(), rng, self._rules).refused
        return explain_refusal(refused[0]) if refused else None

    @contextlib.contextmanager
    def _asking(self, asked: Sequence[ReplicaRequest]) -> Iterator[None]:
        """Count the requests as undecided meanwhile."""
        for one in asked:
            one.model.deploying += 1
            self._asked.append(one)
        try:
            yield
        finally:
            for one in asked:
                one.model.deploying -= 1
                self._asked.remove(one)

    async def _deploy(self, asked: Sequence[ReplicaRequest]) -> list[ProvisionResult]:
        sizes = await asyncio.gather(*(self._size(one) for one in asked))
        sized = list(zip(asked, sizes, strict=True))
        decision = await self._decide({one: size for one, size in sized if isinstance(size, int)})
        self._carry_out(decision, "another model needs its memory")
        refused = {refusal.model_key: explain_refusal(refusal) for refusal in decision.refused}
        provided = []
        for one, size in sized:
            if one.void:
                why = _WITHDRAWN if one.withdrawn else None
                provided.append(ProvisionResult(problem=why, evicted=decision.evictions))
                continue
            variant = str(one.variant)
            problem = size if isinstance(size, str) else refused.get(variant)
            one.model.problems.pop(one.generation, None)
            if problem is not None:
                one.model.problems[one.generation] = problem
            replica_ids = decision.replica_ids(variant)
            provided.append(ProvisionResult(replica_ids, problem, decision.evictions))
        return provided

    async def _decide(self, asked: Mapping[ReplicaRequest, int]) -> Decision:
        """Return a decision that evicts only replicas that have been used.

        Otherwise two models could evict each other again and again without running a request.
        """
        while True:
            demands = [
                one.demand(size, self._files_on.get(one.model.key, frozenset()))
                for one, size in asked.items()
                if not one.void
            ]
            if not self._uses_placement:
                demands = [replace(demand, device=Device.AUTO) for demand in demands]
            decision = self.cluster.deploy(demands, self._now(), self._rng, self._rules)
            leaving = [self._replicas[key] for key in decision.evictions if key in self._replicas]
            unused = [replica for replica in leaving if not replica.used.is_set()]
            if not unused or any(one.dedicated for one in demands):
                return decision
            await asyncio.gather(*(replica.used.wait() for replica in unused))

    async def preview(
        self, config: DeploymentConfig, generation: str, booked: Collection[ModelKey]
    ) -> list[Node]:
        """Return the node of each replica that a booked model would have if it were placed now.

        There are fewer nodes if there is no room; nothing is placed. `booked` are the models of all
        bookings at that time, whose places it cannot take. It can take places of others booked now.

        Raises:
            ActorError: If the model cannot be measured.
        """
        measured = await self._evaluate(config, generation)
        cluster, stay = self.cluster, {self._key(key) for key in booked}
        for replica in self.replicas():
            if replica.model.scheduled is not None and replica.model.key not in stay:
                own = replica.model.config
                kept = own.replicas if own.dedicated else 0
                cluster = cluster.with_dedicated(replica.placed.model_key, kept)
        key = self._key(config.key)
        model = Model(key, replace(config, dedicated=True))
        demand = ReplicaRequest(model, generation, config.replicas).demand(
            measured.size_bytes, self._files_on.get(key, frozenset())
        )
        # A generator of its own, so that later decisions draw the same ties as without this one.
        rng = random.Random(0)  # noqa: S311 - ties, not secrets
        decision = cluster.deploy([demand], self._now(), rng, self._rules)
        return [self.cluster.nodes[each.replica.node_id] for each in decision.placed]

    def note_files(self, key: ModelKey, node_ids: Set[str]) -> None:
        """Note that these nodes have a model's files; placement prefers them to nodes otherwise as good."""
        self._files_on[self._key(key)] = frozenset(node_ids)

    def _key(self, key: ModelKey) -> ModelKey:
        """Return the first key of the model that a key names; the key itself if no model is known."""
        known = self.models.find(key)
        return key if known is None else known.key

    def evict(
        self,
        variants: Iterable[Variant] = (),
        replica_keys: Iterable[ReplicaKey] = (),
        *,
        cold: bool = False,
        why: str = f"{OPERATORS}evicted it",
    ) -> tuple[ReplicaKey, ...]:
        """Evict models or single replicas; return those that were HOT, or no longer exist."""
        to = DeploymentLevel.COLD if cold else DeploymentLevel.WARM
        before = {placed.key for placed in self.cluster.replicas()}
        decision = self.cluster.evict(map(str, variants), replica_keys, to)
        after = {placed.key for placed in decision.cluster.replicas()}
        gone = tuple(dict.fromkeys([*decision.evictions, *sorted(before - after)]))
        self._carry_out(decision, why)
        return gone

    def dedicate(self, model: Model) -> None:
        """Dedicate as many of a model's replicas as its deployment says, and no others."""
        for variant in {replica.placed.model_key for replica in self._of(model)}:
            replicas = model.dedicated_in(Variant.parse(variant).generation)
            self.cluster = self.cluster.with_dedicated(variant, replicas)
        self._take_over()

    def adopt(self, found: Sequence[OrphanReplica]) -> list[Replica]:
        """Adopt replicas that another controller left; end those without a place here."""
        adoption = adopt(self.cluster, self.models, found)
        self.cluster = adoption.cluster
        for one in adoption.dropped:
            logger.warning("%s has no place here and is ended", one.placed.name)
            self._end_aside(one.actor.stop(), one.placed)
        adopted = []
        for one, place, model in adoption.kept:
            replica = self._replicas[place.key] = Replica(place, model, one.actor)
            adopted.append(replica)
            logger.info("%s is adopted", place.name)
            if not one.is_loaded:
                replica.starting = self._spawn(self._create(replica), place.name)
                continue
            replica.came_up()
            replica.mark_used()
            self._learn(replica)
            self._spawn(self._watch(replica), f"watch over {place.name}")
        return adopted

    async def leave(self) -> None:
        """Abandon every replica for another controller to adopt, after ending replicas have ended."""
        self.cluster = Cluster()
        await end(self._tasks - self._ends)
        await _all(*self._ends)
        self._replicas.clear()

    async def stop(self) -> None:
        """End every replica, and wait until all have ended."""
        self.cluster = Cluster()  # later requests find no room
        await end(self._tasks - self._ends)
        await _all(*(replica.actor.stop() for replica in self._replicas.values()), *self._ends)
        self._replicas.clear()

    async def _size(self, asked: ReplicaRequest) -> int | str:
        settings = measured = None
        while measured is None or asked.model.deployment != settings:  # which may change meanwhile
            settings = asked.model.deployment
            try:
                measured = await self._evaluate(settings, asked.generation)
            except ActorError as error:
                return _not_loaded(asked.model, asked.generation, str(error))
        self.models.learn(
            asked.model,
            measured.repo_id,
            measured.task,
            measured.parameters,
            gated=measured.gated,
            on_branch=measured.on_branch,
        )
        if measured.structure is not None:
            # The description by a replica that loaded the model is kept: this one follows from a config.
            asked.model.structures.setdefault(asked.generation, measured.structure)
        if not self._of(asked.model):
            self.models.unite(asked.model)
        if asked.model.same_as is None:
            # Checked again: the hub has told the model's name, its branches, and whether it is restricted.
            why = self.models.not_permitted(asked.model.key, asked.model, gated=asked.gated)
            if why is not None:
                return why
        self._sizes[asked.variant] = measured.size_bytes
        return measured.size_bytes

    # Carrying decisions out

    def _carry_out(self, decision: Decision, why: str) -> None:
        delta = build(self.cluster, decision.cluster)
        coming = {placed.key: self._host(placed) for placed in delta.to_create}
        for described in delta.steps(why):
            logger.info("%s", described)
        for placed, destination in (
            *((each, "disk") for each in delta.to_delete),
            *((each, "cpu") for each in delta.to_cache),
        ):
            if placed.level is DeploymentLevel.HOT:
                label = metrics.model_label(Variant.parse(placed.model_key).model.label)
                metrics.EVICTIONS.labels(label, destination).inc()
        loaded = {key for key, replica in self._replicas.items() if replica.is_loaded}
        # A replica that is still loading has nothing to keep WARM.
        self.cluster = decision.cluster.without(
            d.key for d in delta.to_cache if d.key not in loaded
        )
        self._replicas.update(coming)
        leaving = {
            d.key: (replica, replica.lease)
            for d in [*delta.to_delete, *delta.to_cache]
            if (replica := self._replicas.get(d.key)) is not None
        }
        for replica, _ in leaving.values():
            replica.mark_used()  # decisions that wait for its place can go on
            if replica.placed.level is DeploymentLevel.HOT:
                self._notify_leaving(replica.placed.key, why)
            if not replica.is_loaded:
                replica.failed(EvictedError(why))  # so that nothing waits for it in vain
        for placed in delta.from_cache:
            self._replicas[placed.key].returns(placed)
        self._take_over()
        for node_id, part in delta.by_node().items():
            self._spawn(self._apply(node_id, part, leaving), f"changes of {node_id}")

    def _host(self, placed: PlacedReplica) -> Replica:
        variant = Variant.parse(placed.model_key)
        model = self.models.of(variant.model)
        return Replica(
            placed, model, self._make_actor(model.deployment, variant.generation, placed)
        )

    def _take_over(self) -> None:
        for decided in self.cluster.replicas():
            replica = self._replicas.get(decided.key)
            if replica is not None:
                replica.placed = decided

    async def _apply(
        self,
        node_id: str,
        delta: DeploymentDelta,
        leaving: Mapping[ReplicaKey, tuple[Replica, Lease]],
    ) -> None:
        """Delete, cache, return, create: in this order, after earlier changes of the node."""
        async with self._locks[node_id]:
            await _all(
                *(self._delete(*leaving[d.key]) for d in delta.to_delete if d.key in leaving),
                *(self._cache(*leaving[d.key]) for d in delta.to_cache if d.key in leaving),
            )
            await _all(*(self._return(d.key) for d in delta.from_cache))
            for placed in delta.to_create:
                if (replica := self._replicas.get(placed.key)) is not None:
                    replica.starting = self._spawn(self._create(replica), replica.placed.name)

    async def _delete(self, replica: Replica, lease: Lease) -> None:
        await self._drain(lease)
        await self._end(replica)

    async def _cache(self, replica: Replica, lease: Lease) -> None:
        await self._drain(lease)
        key = replica.placed.key
        if self.cluster.find(key) is not None and not replica.actor.ended.is_set():
            try:
                await within(replica.actor.to_cache(), _CACHE_PATIENCE_S)
            except Exception:
                logger.exception("%s could not be kept WARM", replica.placed.name)
            else:
                return
        await self._end(replica)
        self.cluster = self.cluster.without([key])

    async def _drain(self, lease: Lease) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await within(lease.ended(), self._rules.drain_s)

    async def _end(self, replica: Replica) -> None:
        replica.is_ending = True
        if replica.starting is not None:
            replica.starting.cancel()
        await replica.actor.stop()
        replica.failed(EvictedError("it was evicted before it could serve"))
        if self._replicas.get(replica.placed.key) is replica:
            del self._replicas[replica.placed.key]

    async def _return(self, key: ReplicaKey) -> None:
        if (replica := self._replicas.get(key)) is not None:
            memory = replica.placed.gpu_mem_bytes_by_id
            await self._bring_up(replica, replica.actor.from_cache(memory), "cpu")

    async def _create(self, replica: Replica) -> None:
        await self._bring_up(replica, replica.actor.start(replica.progressed), "disk")
        if replica.is_loaded:
            self._spawn(self._watch(replica), f"watch over {replica.placed.name}")

    async def _bring_up(self, replica: Replica, coming: Awaitable[None], source: str) -> None:
        began = time.monotonic()
        try:
            await coming
            took_s = time.monotonic() - began
            label = replica.model.config.key.label
            metrics.model_loaded(label, replica.generation, source, took_s)
            if source == "disk":
                replica.model.load_s[replica.generation] = took_s
            self._came_up(replica)
        except ActorError as error:
            if isinstance(error, FailedDeviceError):
                self._failed_on(replica, error.failure)
            await self._discover_again()  # a lost node is no fault of the model
            if not replica.is_ending and self._replicas.get(replica.placed.key) is replica:
                await self._fail(replica, str(error))
        except Exception:
            # A defect of the server must not leave it loading for ever.
            logger.exception("%s could not be brought up", replica.placed.name)
            await self._fail(replica, "the server failed; its log says why")

    def _came_up(self, replica: Replica) -> None:
        """Record that the replica serves; its protection from eviction begins now."""
        key = replica.placed.key
        self._learn(replica)
        self.cluster = self.cluster.with_deployed(key, self._now())
        self._take_over()
        logger.info("%s is ready", replica.placed.name)
        replica.model.problems.pop(replica.generation, None)
        for listener in self._up_listeners:
            listener(replica)
        replica.came_up()

    def _learn(self, replica: Replica) -> None:
        if (loaded := replica.actor.model) is None:
            return
        facts = loaded.repo_id, loaded.task, loaded.parameters, loaded.config
        self.models.learn(replica.model, *facts, gated=loaded.gated)
        if loaded.structure is not None:
            replica.model.structures[replica.generation] = loaded.structure

    async def _fail(self, replica: Replica, why: str) -> None:
        sentence = _not_loaded(replica.model, replica.generation, why)
        metrics.LOAD_FAILURES.labels(metrics.model_label(replica.model.config.key.label)).inc()
        logger.error("%s", sentence)
        replica.model.problems[replica.generation] = sentence
        await replica.actor.stop()
        self._forget(replica.placed.key, DeploymentError(sentence))

    async def _watch(self, replica: Replica) -> None:
        await replica.actor.ended.wait()
        if (failure := replica.actor.device_failure) is not None:
            self._failed_on(replica, failure)
        await self._discover_again()  # first, or its place on a lost node would be given away
        self.lost(replica)

    def _failed_on(self, replica: Replica, failure: DeviceFailure) -> None:
        """Record the GPU that a replica was lost to; all of its GPUs if the failure names none."""
        place = replica.placed
        node = self.cluster.nodes.get(place.node_id)
        of_it = [index for index in place.gpu_mem_bytes_by_id if failure.gpu in (None, index)]
        if node is None or not of_it:
            return
        names = [node.gpu_name(index) for index in of_it]
        self._device_errors = self._device_errors.noted(names, failure.error, self._now())
        logger.error("%s was lost to %s: %s", place.name, " or ".join(names), failure.error)
        self._withdraw()

    def _withdraw(self) -> None:
        """Withdraw from placement exactly the GPUs that failed recently."""
        self._withdrawn = self._device_errors.withdrawn(self._now())
        self.cluster = self.cluster.with_withdrawn(self._withdrawn.keys())

    def device_problems(self) -> list[Problem]:
        """Return a problem for each GPU that is out of placement."""
        return [
            Problem(
                ProblemKind.GPU_WITHDRAWN,
                f"GPU {index} of {node.name}",
                f"GPU {index} of {node.name} ({node.gpu_name(index)}) takes no model until "
                f"{datetime.fromtimestamp(out.until).astimezone():%H:%M}: replicas on it ended with "
                f"{MOST} CUDA errors within {format_duration(WITHIN_S)}, the last with {out.error!r}.",
            )
            for node in self.cluster.nodes.values()
            for index in sorted(node.resources.withdrawn)
            if (out := self._withdrawn.get(node.gpu_name(index))) is not None
        ]

    async def _discover_again(self) -> None:
        try:
            await self.discover()
        except Exception:
            logger.exception("the machines could not be discovered")

    def lost(self, replica: Replica) -> None:
        """Remove a replica that was found to be lost, and free its place."""
        if self._replicas.get(replica.placed.key) is replica:
            label = metrics.model_label(replica.model.config.key.label)
            metrics.LOST_REPLICAS.labels(label).inc()
            self._drop_lost(replica.placed.key, EvictedError("its process ended"))

    def _drop_lost(self, key: ReplicaKey, why: DeploymentError) -> None:
        """End a lost replica; the next user of its place waits for that."""
        if (replica := self._replicas.get(key)) is not None:
            self._end_aside(self._end(replica), replica.placed)
        self._forget(key, why)

    def _end_aside(self, ending: Coroutine[Any, Any, None], place: PlacedReplica) -> None:
        task = self._spawn(ending, f"end of {place.name}")
        self._ends.add(task)
        self._spawn(self._wait_for(task, place.node_id), f"place of {place.name}")

    async def _wait_for(self, end: asyncio.Task[None], node_id: str) -> None:
        """Hold back later changes of a node until this task has ended."""
        async with self._locks[node_id]:
            await asyncio.wait([end])

    def _forget(self, key: ReplicaKey, why: DeploymentError) -> None:
        replica = self._replicas.pop(key, None)
        self.cluster = self.cluster.without([key])
        if replica is not None:
            has_served = not replica.is_pending
            replica.failed(why)
            if has_served:  # otherwise `Replica.up` raises
                self._notify_leaving(key, str(why))

    def _of(self, model: Model) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.model is model]

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._ends.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=defect)


async def _all(*work: Awaitable[None]) -> None:
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, Exception):
            logger.error("a change of a replica failed", exc_info=outcome)


def _not_loaded(model: Model, generation: str, why: str) -> str:
    return f"{model.config.repo_id!r} could not be loaded for nnsight {generation}: {why}"
