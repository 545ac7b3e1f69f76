"""The objects that operations act on, and steps that several operations share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import ProvisionResult, ReplicaRequest
from ndif.cluster.models import Model
from ndif.cluster.replica import DeploymentError
from ndif.control.answers import DeployedModel, EvictedReplica
from ndif.control.overview import Overview
from ndif.control.reconciler import Reconciler
from ndif.control.rollout import Rollouts
from ndif.host.runtimes import how_to_add
from ndif.probe.history import Histories
from ndif.queue.callbacks.delivery import CallbackDelivery
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor
from ndif.schema.deployment import OperationError
from ndif.schema.model_key import Variant
from ndif.stores.events import EventLog
from ndif.stores.responder import Responder
from ndif.stores.usage import UsageStore

if TYPE_CHECKING:
    # Imported only where alerts are configured.
    from ndif.alerts.watch import Alerts

_EVICTED = "The server's operator has taken {!r} off the server."
_MAX_QUOTED = 200
"""Characters of an operator's text that an error repeats."""

Evicted = tuple[str, str | None]
"""Model key and replica id of an evicted replica; the id is None if the replica had no place yet."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The objects of one server that operations act on, with steps that several operations share.

    The steps find models by name, refuse changes that the calendar would undo, evict models and provide
    replicas. A step that cannot be done raises an `OperationError`.
    """

    controller: Controller
    dispatcher: Dispatcher
    reconciler: Reconciler
    generations: Callable[[], Sequence[str]]
    """Returns the installed nnsight generations, the newest first."""
    stop: Callable[[], None]
    """Stops the server."""
    usage: UsageStore
    """The record of ended jobs."""
    responder: Responder
    retention_s: float
    """Seconds for which the record of a job is kept."""
    callbacks: CallbackDelivery
    overview: Overview
    """The state that the dashboard shows."""
    histories: Histories = field(default_factory=Histories)
    """The outcomes of the server's own probes."""
    alerts: Alerts | None = None
    """The alerts of the operator; None if the server sends none."""
    events: EventLog = field(default_factory=EventLog)
    """The log of events for operators."""
    rollouts: Rollouts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", Rollouts(self.controller, self.dispatcher))

    def find(self, name: str) -> list[Model]:
        """Return the models with this repository id, or the model with this full key; raise for none."""
        try:
            models = self.controller.models.called(name)
        except ValueError as error:
            raise OperationError(400, str(error)) from error
        if not models:
            names = ", ".join(sorted({m.config.repo_id for m in self.controller.models}))
            raise OperationError(
                404,
                f"There is no model {name[:_MAX_QUOTED]!r} on this server"
                + (f"; there is {names}." if names else ", nor any other."),
            )
        return models

    def installed(self, generation: str | None) -> str:
        """Return `generation`, or the newest generation for None; raise if it is not installed."""
        installed = self.generations()
        if generation is None and installed:
            return installed[0]
        if generation not in installed:
            raise OperationError(
                400,
                f"nnsight {generation} is not installed here; {', '.join(installed) or 'none'} is. "
                f"{how_to_add(str(generation))}",
            )
        return str(generation)

    def processors(self, model: Model) -> list[Processor]:
        """Return the model's processors, one per generation."""
        return [p for p in self.dispatcher.processors.values() if p.model is model]

    def requested_replicas(self, model: Model) -> int:
        """Return the largest number of replicas that the operator requested for any generation."""
        requested = [
            processor.least_replicas
            for processor in self.processors(model)
            if model.keeps(processor.variant.generation)
        ]
        return max(requested, default=0) or model.config.replicas

    def refuse_scheduled(self, models: Iterable[Model], replica_id: str | None = None) -> None:
        """Raise if the calendar dedicates one of these models now, because it would undo a change.

        A change of the replica `replica_id` is permitted if that replica is not dedicated.
        """
        if replica_id is not None and any(
            replica.placed.replica_id == replica_id and not replica.placed.dedicated
            for replica in self.controller.replicas()
        ):
            return
        for model in models:
            if model.scheduled is None:
                continue
            until = self.reconciler.scheduled_until(model)
            when = f"until {until:%Y-%m-%d %H:%M} {until.tzname()}" if until else "now"
            raise OperationError(
                409,
                f"The calendar has {model.config.repo_id!r} deployed {when}, with "
                f"{model.scheduled.replicas} replica{'s' * (model.scheduled.replicas != 1)}: change the "
                "calendar instead.",
            )

    async def evict_model(
        self, model: Model, *, cold: bool, generation: str | None = None
    ) -> list[Evicted]:
        """Evict every replica of a model, or of one generation; end its waiting requests with an ERROR.

        Return the evicted replicas, and the variants without a replica that were requested or had failed.
        """

        def is_meant(variant: Variant) -> bool:
            return generation in (None, variant.generation)

        undecided = filter(is_meant, self.controller.undecided(model))
        unplaced = set(map(str, undecided))
        model.withdrawals += 1
        model.generations = frozenset() if generation is None else model.generations - {generation}
        if not model.generations:
            model.config = replace(model.config, dedicated=False)
        processors = [
            processor for processor in self.processors(model) if is_meant(processor.variant)
        ]
        for processor in processors:
            if await processor.fail_waiting(_EVICTED.format(model.config.repo_id)):
                unplaced.add(str(processor.variant))
        variants = [processor.variant for processor in processors]
        failed = filter(
            is_meant,
            (Variant(model.key, failed_generation) for failed_generation in [*model.problems]),
        )
        unplaced |= set(map(str, failed))
        if model.problems and model.parameters is None and model.scheduled is None:
            # The model was never measured. As an on-demand model it is forgotten, with its problem.
            model.on_demand = True
        for failed_generation in [*model.problems]:
            if is_meant(Variant(model.key, failed_generation)):
                del model.problems[failed_generation]
        evicted = self.controller.evict(variants, cold=cold)
        unplaced -= {model_key for model_key, _ in evicted}
        return [*evicted, *((model_key, None) for model_key in sorted(unplaced))]

    async def provide(
        self, requests: Sequence[ReplicaRequest], *, wait: bool, evicted: Sequence[Evicted] = ()
    ) -> list[DeployedModel]:
        """Request replicas from the controller and return the outcome of each request.

        With `wait`, return once every replica is ready or has failed. `evicted` are replicas that were
        evicted beforehand.
        """
        provided = await self.controller.deploy(requests) if requests else []
        results = list(zip(requests, provided, strict=True))
        for request, result in results:
            processor = self.dispatcher.processor(request.model, request.generation)
            processor.adopt(result.replica_ids)
        if wait:
            results = [
                (request, await self._until_up(request, result)) for request, result in results
            ]
        return [outcome_of(request, result, evicted) for request, result in results]

    def forget_unloadable(self, model: Model) -> None:
        """Forget a new model that could not be measured, so that others do not see it fail."""
        variants = [Variant(model.key, generation) for generation in model.problems]
        is_measured = any(self.controller.size_of(variant) is not None for variant in variants)
        if variants and not is_measured and model.scheduled is None:
            model.on_demand, model.generations = True, frozenset()
            model.config = replace(model.config, dedicated=False)
            model.problems.clear()
            self.dispatcher.forget_idle()

    async def _until_up(self, request: ReplicaRequest, result: ProvisionResult) -> ProvisionResult:
        """Wait until each provided replica is up or has failed; return the result without failed ones."""
        up = []
        for replica_id in result.replica_ids:
            replica = self.controller.replica(request.variant, replica_id)
            if replica is not None:
                with contextlib.suppress(DeploymentError):
                    await replica.up()
                    up.append(replica_id)
        return replace(result, replica_ids=tuple(up))


def outcome_of(
    request: ReplicaRequest, result: ProvisionResult, evicted: Sequence[Evicted] = ()
) -> DeployedModel:
    """Return the outcome of a request for replicas; `evicted` are replicas evicted beforehand."""
    every = dict.fromkeys((*evicted, *result.evicted))
    problem = result.problem
    if problem is None and request.replicas and not request.withdrawn:
        # A provided replica may have failed to load in the meantime.
        problem = request.model.problems.get(request.generation)
    return DeployedModel(
        repo_id=request.model.config.repo_id,
        generation=request.generation,
        replicas=list(result.replica_ids),
        evicted=[EvictedReplica(model=model, replica_id=replica) for model, replica in every],
        problem=problem,
    )
