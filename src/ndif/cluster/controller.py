"""The controller: decides which replicas exist, and creates, moves and ends them.

`cluster` is the decided state, an immutable value, which the replicas follow. Decisions take effect at
once. Changes to a node are made in the order of the decisions, so that no replica takes memory before the
previous owner has freed it.
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
from ndif.host.device_errors import MAX_ERRORS, WINDOW_S, DeviceErrors, DeviceFailure, Withdrawal
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
"""Seconds that a replica may take to leave its device before it is ended, because other replicas wait."""
OPERATOR_PREFIX = "its operator "
"""Prefix of reasons for changes that an operator made."""
_WITHDRAWN = f"{OPERATOR_PREFIX}evicted it before it had a place"


class Controller:
    """The owner of all replicas, which creates and ends them as requests and operators demand.

    Owns the decided `Cluster` and a `Replica` with its actor for each place in it. Gets nodes and actors
    from a fleet, and sizes from an evaluator. Processors run the requests, and wait for `Replica.up`.
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
        """Create a controller without nodes; `discover` finds them.

        `rng` decides ties and ids. `uses_placement`: True to place models by free memory, False to follow
        the models' options.
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
        """Tasks that must not be cancelled, so that no process is left behind."""
        self._sizes: dict[Variant, int] = {}
        self._files_on: dict[ModelKey, frozenset[str]] = {}
        """Ids of the nodes to which a model was downloaded before it was placed."""
        self._device_errors = DeviceErrors()
        self._withdrawn: dict[str, Withdrawal] = {}
        self._undecided: list[ReplicaRequest] = []

    # State

    @property
    def cluster(self) -> Cluster:
        """Return the decided state."""
        return self._cluster

    @cluster.setter
    def cluster(self, cluster: Cluster) -> None:
        self._cluster = cluster
        hot = {
            replica.model_key
            for replica in cluster.replicas()
            if replica.level is DeploymentLevel.HOT
        }
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
        """Return the requested variants of a model that have no place yet."""
        return {
            request.variant
            for request in self._undecided
            if request.model is model and not request.withdrawn
        }

    def on_leave(self, listener: Leaving) -> None:
        """Call `listener` for each replica that no longer serves."""
        self._leave_listeners.append(listener)

    def on_up(self, listener: Callable[[Replica], None]) -> None:
        """Call `listener` for each replica that begins to serve."""
        self._up_listeners.append(listener)

    def _notify_leaving(self, key: ReplicaKey, why: str) -> None:
        for listener in self._leave_listeners:
            listener(key, why)

    # Operations

    async def discover(self) -> None:
        """Find the nodes, and record added and lost ones."""
        nodes = await self._discover()
        discovery = self.cluster.with_nodes(nodes)  # read after the wait
        self.cluster = discovery.cluster
        self._withdraw()
        for node_id in discovery.removed:
            logger.warning("node %s is lost with its replicas", node_id)
        for key in discovery.lost:
            self._drop_lost(key, EvictedError("its node is gone"))

    async def deploy(self, requests: Sequence[ReplicaRequest]) -> list[ProvisionResult]:
        """Create the requested replicas that fit, in one decision that places the largest model first.

        Returns before the replicas are loaded; `Replica.up` waits for that. A request that is withdrawn
        meanwhile is void.
        """
        with self._counted_undecided(requests):
            return await self._deploy(requests)

    async def deploy_beside(
        self, requests: Sequence[ReplicaRequest]
    ) -> list[ProvisionResult] | None:
        """Create the requested replicas in addition to existing ones, as `deploy` does.

        Return None without creating a replica if that is not possible without evictions.
        """
        with self._counted_undecided(requests):
            sizes = await asyncio.gather(*(self._size(request) for request in requests))
            demands = []
            for request, size in zip(requests, sizes, strict=True):
                if isinstance(size, str) or request.void:
                    return None
                demand = request.demand(size, self._files_on.get(request.model.key, frozenset()))
                existing = len(self.cluster.hot(demand.model_key))
                demands.append(replace(demand, replicas=request.replicas + existing))
            decision = self.cluster.deploy(demands, self._now(), self._rng, self._rules)
            if decision.refused or decision.evictions:
                return None
            before = {placed.key for placed in self.cluster.replicas()}
            self._carry_out(decision, "")
            provided = []
            for demand in demands:
                replica_ids = decision.replica_ids(demand.model_key)
                new = tuple(
                    replica_id
                    for replica_id in replica_ids
                    if (demand.model_key, replica_id) not in before
                )
                provided.append(ProvisionResult(new))
            return provided

    async def check(
        self, config: DeploymentConfig, generation: str, freed: Collection[ReplicaKey] = ()
    ) -> str | None:
        """Return the reason why a model cannot be loaded with these settings; None if no reason is known.

        The model is measured, and must fit in the cluster without the replicas `freed`.
        """
        model = Model(self._first_key(config.key), config)
        try:
            measured = await self._evaluate(config, generation)
        except ActorError as error:
            return _not_loaded(model, generation, str(error))
        cluster = self.cluster.without(freed)
        demand = ReplicaRequest(model, generation, config.replicas).demand(measured.size_bytes)
        if not self._uses_placement:
            demand = replace(demand, device=Device.AUTO)
        # Use a separate generator, so that later decisions draw the same ties as without this call.
        rng = random.Random(0)  # noqa: S311 - ties, not secrets
        refused = cluster.deploy([demand], self._now(), rng, self._rules).refused
        return explain_refusal(refused[0]) if refused else None

    @contextlib.contextmanager
    def _counted_undecided(self, requests: Sequence[ReplicaRequest]) -> Iterator[None]:
        """Count the requests as undecided until the end of the block."""
        for request in requests:
            request.model.deploying += 1
            self._undecided.append(request)
        try:
            yield
        finally:
            for request in requests:
                request.model.deploying -= 1
                self._undecided.remove(request)

    async def _deploy(self, requests: Sequence[ReplicaRequest]) -> list[ProvisionResult]:
        sizes = await asyncio.gather(*(self._size(request) for request in requests))
        sized = list(zip(requests, sizes, strict=True))
        decision = await self._decide(
            {request: size for request, size in sized if isinstance(size, int)}
        )
        self._carry_out(decision, "another model needs its memory")
        refused = {refusal.model_key: explain_refusal(refusal) for refusal in decision.refused}
        provided = []
        for request, size in sized:
            if request.void:
                why = _WITHDRAWN if request.withdrawn else None
                provided.append(ProvisionResult(problem=why, evicted=decision.evictions))
                continue
            variant = str(request.variant)
            problem = size if isinstance(size, str) else refused.get(variant)
            request.model.problems.pop(request.generation, None)
            if problem is not None:
                request.model.problems[request.generation] = problem
            replica_ids = decision.replica_ids(variant)
            provided.append(ProvisionResult(replica_ids, problem, decision.evictions))
        return provided

    async def _decide(self, size_by_request: Mapping[ReplicaRequest, int]) -> Decision:
        """Return a decision for requests and the sizes of their models, in bytes.

        Unless a demand is dedicated, wait until each replica that it evicts has run a request, and decide
        again. Otherwise two models could evict each other repeatedly without running a request.
        """
        while True:
            demands = [
                request.demand(size, self._files_on.get(request.model.key, frozenset()))
                for request, size in size_by_request.items()
                if not request.void
            ]
            if not self._uses_placement:
                demands = [replace(demand, device=Device.AUTO) for demand in demands]
            decision = self.cluster.deploy(demands, self._now(), self._rng, self._rules)
            leaving = [self._replicas[key] for key in decision.evictions if key in self._replicas]
            unused = [replica for replica in leaving if not replica.used.is_set()]
            if not unused or any(demand.dedicated for demand in demands):
                return decision
            await asyncio.gather(*(replica.used.wait() for replica in unused))

    async def preview(
        self, config: DeploymentConfig, generation: str, booked: Collection[ModelKey]
    ) -> list[Node]:
        """Return the node of each replica that a booked model would have if it were placed now.

        Replicas that do not fit have no node. This places no replica. `booked` are the models of all
        bookings at that time; their places are taken. Models that are booked now, but not then, can lose
        their places.

        Raises:
            ActorError: If the model cannot be measured.
        """
        measured = await self._evaluate(config, generation)
        cluster, stay = self.cluster, {self._first_key(key) for key in booked}
        for replica in self.replicas():
            if replica.model.scheduled is not None and replica.model.key not in stay:
                own = replica.model.config
                kept = own.replicas if own.dedicated else 0
                cluster = cluster.with_dedicated(replica.placed.model_key, kept)
        key = self._first_key(config.key)
        model = Model(key, replace(config, dedicated=True))
        demand = ReplicaRequest(model, generation, config.replicas).demand(
            measured.size_bytes, self._files_on.get(key, frozenset())
        )
        # Use a separate generator, so that later decisions draw the same ties as without this call.
        rng = random.Random(0)  # noqa: S311 - ties, not secrets
        decision = cluster.deploy([demand], self._now(), rng, self._rules)
        return [self.cluster.nodes[placement.replica.node_id] for placement in decision.placed]

    def note_files(self, key: ModelKey, node_ids: Set[str]) -> None:
        """Record which nodes have a model's files; placement prefers them among equally good nodes."""
        self._files_on[self._first_key(key)] = frozenset(node_ids)

    def _first_key(self, key: ModelKey) -> ModelKey:
        """Return the first key of the model that `key` names; `key` if the model is unknown."""
        model = self.models.find(key)
        return key if model is None else model.key

    def evict(
        self,
        variants: Iterable[Variant] = (),
        replica_keys: Iterable[ReplicaKey] = (),
        *,
        cold: bool = False,
        why: str = f"{OPERATOR_PREFIX}evicted it",
    ) -> tuple[ReplicaKey, ...]:
        """Evict models or single replicas; return the replicas that were HOT or no longer exist."""
        level = DeploymentLevel.COLD if cold else DeploymentLevel.WARM
        before = {placed.key for placed in self.cluster.replicas()}
        decision = self.cluster.evict(map(str, variants), replica_keys, level)
        after = {placed.key for placed in decision.cluster.replicas()}
        evicted = tuple(dict.fromkeys([*decision.evictions, *sorted(before - after)]))
        self._carry_out(decision, why)
        return evicted

    def dedicate(self, model: Model) -> None:
        """Dedicate exactly as many of a model's replicas as its deployment requests."""
        for variant in {replica.placed.model_key for replica in self._replicas_of(model)}:
            replicas = model.dedicated_in(Variant.parse(variant).generation)
            self.cluster = self.cluster.with_dedicated(variant, replicas)
        self._update_places()

    def adopt(self, orphans: Sequence[OrphanReplica]) -> list[Replica]:
        """Adopt replicas that an earlier controller left; end replicas that cannot be adopted."""
        adoption = adopt(self.cluster, self.models, orphans)
        self.cluster = adoption.cluster
        for orphan in adoption.dropped:
            logger.warning("%s cannot be adopted and is ended", orphan.placed.name)
            self._end_aside(orphan.actor.stop(), orphan.placed)
        adopted = []
        for orphan, place, model in adoption.kept:
            replica = self._replicas[place.key] = Replica(place, model, orphan.actor)
            adopted.append(replica)
            logger.info("%s is adopted", place.name)
            if not orphan.is_loaded:
                replica.starting = self._spawn(self._create(replica), place.name)
                continue
            replica.record_up()
            replica.mark_used()
            self._learn(replica)
            self._spawn(self._watch(replica), f"watch over {place.name}")
        return adopted

    async def leave(self) -> None:
        """Leave every replica running for another controller to adopt; wait until ending replicas end."""
        self.cluster = Cluster()
        await end(self._tasks - self._ends)
        await _wait_for_all(*self._ends)
        self._replicas.clear()

    async def stop(self) -> None:
        """End every replica, and wait until all have ended."""
        self.cluster = Cluster()  # so that later requests find no memory
        await end(self._tasks - self._ends)
        await _wait_for_all(
            *(replica.actor.stop() for replica in self._replicas.values()), *self._ends
        )
        self._replicas.clear()

    async def _size(self, request: ReplicaRequest) -> int | str:
        settings = measured = None
        while (
            measured is None or request.model.deployment != settings
        ):  # settings may change during the wait
            settings = request.model.deployment
            try:
                measured = await self._evaluate(settings, request.generation)
            except ActorError as error:
                return _not_loaded(request.model, request.generation, str(error))
        self.models.learn(
            request.model,
            measured.repo_id,
            measured.task,
            measured.parameters,
            gated=measured.gated,
            on_branch=measured.on_branch,
        )
        if measured.structure is not None:
            # Keep the description by a replica that loaded the model: this one was built from the config.
            request.model.structures.setdefault(request.generation, measured.structure)
        if not self._replicas_of(request.model):
            self.models.unite(request.model)
        if request.model.same_as is None:
            # Check again: its name, branches and restrictions on the hub are known only now.
            why = self.models.not_permitted(request.model.key, request.model, gated=request.gated)
            if why is not None:
                return why
        self._sizes[request.variant] = measured.size_bytes
        return measured.size_bytes

    # Carrying decisions out

    def _carry_out(self, decision: Decision, why: str) -> None:
        delta = build(self.cluster, decision.cluster)
        created = {placed.key: self._new_replica(placed) for placed in delta.to_create}
        for described in delta.steps(why):
            logger.info("%s", described)
        for placed, destination in (
            *((placed, "disk") for placed in delta.to_delete),
            *((placed, "cpu") for placed in delta.to_cache),
        ):
            if placed.level is DeploymentLevel.HOT:
                label = metrics.model_label(Variant.parse(placed.model_key).model.label)
                metrics.EVICTIONS.labels(label, destination).inc()
        loaded = {key for key, replica in self._replicas.items() if replica.is_loaded}
        # A replica that still loads has no weights to keep WARM.
        self.cluster = decision.cluster.without(
            d.key for d in delta.to_cache if d.key not in loaded
        )
        self._replicas.update(created)
        leaving = {
            d.key: (replica, replica.lease)
            for d in [*delta.to_delete, *delta.to_cache]
            if (replica := self._replicas.get(d.key)) is not None
        }
        for replica, _ in leaving.values():
            replica.mark_used()  # lets decisions that wait for its place continue
            if replica.placed.level is DeploymentLevel.HOT:
                self._notify_leaving(replica.placed.key, why)
            if not replica.is_loaded:
                replica.record_failure(EvictedError(why))  # so that no caller waits forever
        for placed in delta.from_cache:
            self._replicas[placed.key].prepare_return(placed)
        self._update_places()
        for node_id, part in delta.by_node().items():
            self._spawn(self._apply(node_id, part, leaving), f"changes of {node_id}")

    def _new_replica(self, placed: PlacedReplica) -> Replica:
        variant = Variant.parse(placed.model_key)
        model = self.models.of(variant.model)
        return Replica(
            placed, model, self._make_actor(model.deployment, variant.generation, placed)
        )

    def _update_places(self) -> None:
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
        """Delete, cache, return and create replicas, in this order, after earlier changes of the node."""
        async with self._locks[node_id]:
            await _wait_for_all(
                *(self._delete(*leaving[d.key]) for d in delta.to_delete if d.key in leaving),
                *(self._cache(*leaving[d.key]) for d in delta.to_cache if d.key in leaving),
            )
            await _wait_for_all(*(self._return(d.key) for d in delta.from_cache))
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
        replica.record_failure(EvictedError("it was evicted before it could serve"))
        if self._replicas.get(replica.placed.key) is replica:
            del self._replicas[replica.placed.key]

    async def _return(self, key: ReplicaKey) -> None:
        if (replica := self._replicas.get(key)) is not None:
            memory = replica.placed.gpu_mem_bytes_by_id
            await self._bring_up(replica, replica.actor.from_cache(memory), "cpu")

    async def _create(self, replica: Replica) -> None:
        await self._bring_up(replica, replica.actor.start(replica.record_progress), "disk")
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
                self._record_device_failure(replica, error.failure)
            await self._discover_again()  # a lost node is no fault of the model
            if not replica.is_ending and self._replicas.get(replica.placed.key) is replica:
                await self._fail(replica, str(error))
        except Exception:
            # After a defect of the server, the replica must not stay loading forever.
            logger.exception("%s could not be brought up", replica.placed.name)
            await self._fail(replica, "the server failed; its log says why")

    def _came_up(self, replica: Replica) -> None:
        """Record that the replica serves, which begins its protection from eviction."""
        key = replica.placed.key
        self._learn(replica)
        self.cluster = self.cluster.with_deployed(key, self._now())
        self._update_places()
        logger.info("%s is ready", replica.placed.name)
        replica.model.problems.pop(replica.generation, None)
        for listener in self._up_listeners:
            listener(replica)
        replica.record_up()

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
            self._record_device_failure(replica, failure)
        await self._discover_again()  # first, so that its place on a lost node is not reused
        self.lost(replica)

    def _record_device_failure(self, replica: Replica, failure: DeviceFailure) -> None:
        """Record the failed GPU of a replica; all GPUs of the replica if the failure names none."""
        place = replica.placed
        node = self.cluster.nodes.get(place.node_id)
        indices = [index for index in place.gpu_mem_bytes_by_id if failure.gpu in (None, index)]
        if node is None or not indices:
            return
        names = [node.gpu_name(index) for index in indices]
        self._device_errors = self._device_errors.noted(names, failure.error, self._now())
        logger.error(
            "%s was lost by a failure of %s: %s", place.name, " or ".join(names), failure.error
        )
        self._withdraw()

    def _withdraw(self) -> None:
        """Withdraw the recently failed GPUs from placement, and no others."""
        self._withdrawn = self._device_errors.withdrawn(self._now())
        self.cluster = self.cluster.with_withdrawn(self._withdrawn.keys())

    def device_problems(self) -> list[Problem]:
        """Return a problem for each withdrawn GPU."""
        return [
            Problem(
                ProblemKind.GPU_WITHDRAWN,
                f"GPU {index} of {node.name}",
                f"GPU {index} of {node.name} ({node.gpu_name(index)}) takes no model until "
                f"{datetime.fromtimestamp(withdrawal.until).astimezone():%H:%M}: replicas on it ended with "
                f"{MAX_ERRORS} CUDA errors within {format_duration(WINDOW_S)}, the last with "
                f"{withdrawal.error!r}.",
            )
            for node in self.cluster.nodes.values()
            for index in sorted(node.resources.withdrawn)
            if (withdrawal := self._withdrawn.get(node.gpu_name(index))) is not None
        ]

    async def _discover_again(self) -> None:
        try:
            await self.discover()
        except Exception:
            logger.exception("the machines could not be discovered")

    def lost(self, replica: Replica) -> None:
        """Remove a lost replica, and free its place."""
        if self._replicas.get(replica.placed.key) is replica:
            label = metrics.model_label(replica.model.config.key.label)
            metrics.LOST_REPLICAS.labels(label).inc()
            self._drop_lost(replica.placed.key, EvictedError("its process ended"))

    def _drop_lost(self, key: ReplicaKey, why: DeploymentError) -> None:
        """End a lost replica; the next replica in its place waits for the end."""
        if (replica := self._replicas.get(key)) is not None:
            self._end_aside(self._end(replica), replica.placed)
        self._forget(key, why)

    def _end_aside(self, ending: Coroutine[Any, Any, None], place: PlacedReplica) -> None:
        task = self._spawn(ending, f"end of {place.name}")
        self._ends.add(task)
        self._spawn(self._wait_for(task, place.node_id), f"place of {place.name}")

    async def _wait_for(self, end: asyncio.Task[None], node_id: str) -> None:
        """Delay later changes of a node until this task has ended."""
        async with self._locks[node_id]:
            await asyncio.wait([end])

    def _forget(self, key: ReplicaKey, why: DeploymentError) -> None:
        replica = self._replicas.pop(key, None)
        self.cluster = self.cluster.without([key])
        if replica is not None:
            has_served = not replica.is_pending
            replica.record_failure(why)
            if has_served:  # otherwise `Replica.up` raises
                self._notify_leaving(key, str(why))

    def _replicas_of(self, model: Model) -> list[Replica]:
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


async def _wait_for_all(*work: Awaitable[None]) -> None:
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, Exception):
            logger.error("a change of a replica failed", exc_info=outcome)


def _not_loaded(model: Model, generation: str, why: str) -> str:
    return f"{model.config.repo_id!r} could not be loaded for nnsight {generation}: {why}"
