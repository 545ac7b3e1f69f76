"""Operations: the operator's commands to the running server, each defined once.

An `Operation` defines the JSON body of its `/admin` route, the arguments of its event to the leader, and
the method that performs it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)

from ndif.cluster.controller import OPERATOR_PREFIX
from ndif.cluster.controller_types import ProvisionResult, ReplicaRequest
from ndif.cluster.models import Model
from ndif.config.short_ids import matching_ids
from ndif.control import answers
from ndif.control.control_plane import ControlPlane, Evicted, outcome_of
from ndif.control.state import (
    current_problems,
    model_states,
    node_states,
    queue_states,
    sentences,
    trace_of,
    unfinished_jobs,
)
from ndif.errors import problems
from ndif.queue.callbacks.delivery import CallbackDelivery
from ndif.schema.alerts import Alerts as AlertsState
from ndif.schema.alerts import TestedAlerts
from ndif.schema.answer import JsonObject
from ndif.schema.callback import Callbacks
from ndif.schema.deployment import DeploymentConfig, Generation, OperationError
from ndif.schema.deployment_file import (
    AsInFile,
    DeploymentFileError,
    changes_from_value,
    to_entry,
)
from ndif.schema.deployment_settings import (
    DeploymentChange,
    SettingDifference,
    SettingsError,
    differences,
)
from ndif.schema.job_state import A_JOB, JobList, JobState, Queues, Trace
from ndif.schema.model_key import Variant
from ndif.schema.server_state import ServerState
from ndif.schema.states import DeploymentLevel
from ndif.stores.broker import BrokerError
from ndif.stores.objects import ObjectStoreError
from ndif.stores.usage import Group, UsageUnavailableError

if TYPE_CHECKING:
    # Imported only where alerts are configured.
    from ndif.alerts.watch import Alerts

_KILLED = "The server's operator has ended this job."
_CANCELLED = "You have ended this job."
_LATE_REQUESTS_S = 600.0
"""Seconds for which requests of a revoked key may still arrive, because gateways cache keys."""
_REVOKED = "This job is ended: its API key was revoked. Ask the server's operator for another."
_HOT = DeploymentLevel.HOT
_MAX_QUOTED = 100
"""Characters of an operator's text that an error repeats."""
_NO_NUL = r"^[^\x00]*$"
"""A text without NUL, which databases refuse or end the text at."""

T = TypeVar("T")


def _parse_deployments(value: object) -> tuple[DeploymentChange, ...]:
    if isinstance(value, tuple) and all(isinstance(change, DeploymentChange) for change in value):
        return value
    changes = changes_from_value(value, "deployments")
    if not changes:
        raise DeploymentFileError(["The request names no model to deploy."])
    return changes


Deployments = Annotated[
    tuple[DeploymentChange, ...],
    PlainValidator(_parse_deployments),
    PlainSerializer(lambda changes: [to_entry(change.config, change.given) for change in changes]),
    AsInFile(),
]
"""Models to deploy; in JSON, the list or mapping of a deployment file."""


def with_example(example: JsonObject) -> ConfigDict:
    """Return a pydantic configuration with an example of the operation's body."""
    return ConfigDict(json_schema_extra={"examples": [example]})


class Body(BaseModel):
    """The JSON body of a request, or a part of it."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class Command(Body):
    """One command of an operator: its fields, their checks, and the method that performs it."""

    name: ClassVar[str]
    """Last part of its route, `/admin/NAME`."""
    method: ClassVar[str] = "POST"
    """`GET` for a read-only command."""
    perform: ClassVar[Callable[..., Awaitable[Any]]]
    answer: ClassVar[type[Any]]
    """Type of the answer, from the return annotation of `perform`."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.answer = get_type_hints(cls.perform).get("return", object)


class Operation(Command):
    """A command to the leader."""

    event: ClassVar[str]
    """Name of the operation in the stream of events to the leader."""

    async def perform(self, control: ControlPlane) -> Any:
        """Perform the operation and return its answer; raise an OperationError if it fails."""
        raise NotImplementedError


class GetStatus(Operation):
    """Nodes, models, replicas and the calendar."""

    name, event, method = "status", "STATUS", "GET"

    async def perform(self, control: ControlPlane) -> ServerState:
        disk = control.responder.problem()
        return ServerState(
            nodes=node_states(control.controller),
            models=model_states(control.controller, control.dispatcher, control.histories),
            problems=[*sentences(current_problems(control.controller)), *([disk] if disk else [])],
            schedule=control.reconciler.schedule_state(),
        )


class GetQueue(Operation):
    """Running and waiting requests, model by model."""

    name, event, method = "queue", "QUEUE_STATE_REQUEST", "GET"

    async def perform(self, control: ControlPlane) -> Queues:
        return queue_states(control.dispatcher)


class Export(Operation):
    """A deployment file of the current deployments; deploying the file restores them."""

    name, event, method = "export", "EXPORT", "GET"

    async def perform(self, control: ControlPlane) -> answers.Exported:
        controller = control.controller
        # A leaving replica still exists, but is no longer HOT in the cluster.
        serving = {d.key for d in controller.cluster.replicas() if d.level is _HOT}
        hot = {id(h.model) for h in controller.replicas() if h.placed.key in serving}
        newest = next(iter(control.generations()), None)
        entries = []
        for model in controller.models:
            config, replicas = model.config, control.requested_replicas(model)
            # With 0 replicas, an operator's model is loaded on demand, like a user's model.
            dedicated = config.dedicated and replicas > 0
            if not dedicated and id(model) not in hot:
                continue
            replicas, max_replicas = max(1, replicas), config.max_replicas
            is_default = model.generations <= {config.runtime or newest}
            deployed = replace(
                config,
                replicas=replicas,
                max_replicas=None if max_replicas is None else max(max_replicas, replicas),
                dedicated=dedicated,
                generations=() if is_default else tuple(sorted(model.generations)),
            )
            entries.append(to_entry(deployed))
        return answers.Exported(version=1, deployments=entries)


class Deploy(Operation):
    """Deploy models.

    A setting that is not given keeps its value if the model is known; with `sync`, it becomes the default.
    """

    model_config = with_example(
        {"deployments": [{"repo_id": "openai-community/gpt2", "replicas": 1}], "wait": True}
    )
    name, event = "deploy", "DEPLOY"

    deployments: Deployments
    generation: Generation | None = None
    """The nnsight generation to deploy them for; None: each model's own setting."""
    wait: bool = False
    """Answer once every replica is ready or has failed."""
    sync: bool = False
    """Evict deployed models that the request does not name."""

    async def perform(self, control: ControlPlane) -> answers.Outcomes:
        # Make every check before the first eviction.
        plans = [self._plan(control, change) for change in self.deployments]
        kept = {id(plan.model) for plan in plans}
        others = [m for m in control.controller.models if id(m) not in kept and m.scheduled is None]
        leaving = others if self.sync else []
        refusals = [await self._refusals(control, plan, leaving) for plan in plans]
        outcomes = [outcome for of_plan in refusals for outcome in of_plan]
        evicted: list[Evicted] = []
        if not outcomes:
            for other in leaving:
                evicted += await control.evict_model(other, cold=False)
        plans = [plan for plan, refused in zip(plans, refusals, strict=True) if not refused]
        # Two names may mean one model: the last settings win.
        rolled = {id(plan.model): plan for plan in plans if plan.is_rollout(control)}
        plain = [plan for plan in plans if id(plan.model) not in rolled]
        provided = await asyncio.gather(
            self._provide(control, plain, evicted),
            *(self._roll_out(control, plan, evicted) for plan in rolled.values()),
        )
        outcomes += [outcome for group in provided for outcome in group]
        return answers.Outcomes(models=outcomes)

    def _plan(self, control: ControlPlane, change: DeploymentChange) -> _Plan:
        models = control.controller.models
        model, config = models.find(change.config.key), change.config
        if model is not None:
            try:
                config = models.as_known(config if self.sync else change.applied_to(model.config))
            except SettingsError as error:
                raise OperationError(400, f"{config.repo_id}: {error}") from error
        chosen = config.deployed_for if self.generation is None else (self.generation,)
        generations = [control.installed(generation) for generation in chosen or (None,)]
        before = None if model is None else model.config
        return _Plan(model, before, config, generations, change)

    async def _refusals(
        self, control: ControlPlane, plan: _Plan, leaving: Sequence[Model]
    ) -> list[answers.DeployedModel]:
        """Return an outcome for each generation in which the model cannot be loaded with its new settings.

        `leaving` are the models that will be evicted. The model keeps its old settings if the list is not
        empty.
        """
        if not plan.is_changed:
            return []
        replicas = control.controller.replicas()
        own_replicas = [replica for replica in replicas if replica.model is plan.model]
        freed = [
            replica.placed.key for replica in replicas if replica.model in (plan.model, *leaving)
        ]
        outcomes = []
        for generation in plan.generations:
            problem = await control.controller.check(plan.config, generation, freed)
            if problem is None:
                continue
            serving = [
                replica
                for replica in own_replicas
                if replica.generation == generation and replica.serving
            ]
            if serving:
                name, reason = plan.config.repo_id, problem.removesuffix(".")
                problem = f"{reason}. {name!r} continues to serve with its previous settings."
            outcomes.append(
                answers.DeployedModel(
                    repo_id=plan.config.repo_id,
                    generation=generation,
                    replicas=[replica.placed.replica_id for replica in serving],
                    evicted=[],
                    problem=problem,
                )
            )
        return outcomes

    async def _roll_out(
        self, control: ControlPlane, plan: _Plan, evicted: Sequence[Evicted]
    ) -> list[answers.DeployedModel]:
        if plan.model is None:
            return []
        changes = plan.changes
        results = await control.rollouts.roll_out(
            plan.model, plan.config, plan.generations, wait=self.wait
        )
        return [
            replace(
                outcome_of(rolled_out.request, rolled_out.result, evicted),
                changes=() if rolled_out.result.problem else changes,
                is_down=rolled_out.is_down,
                down_s=rolled_out.down_s,
            )
            for rolled_out in results
        ]

    async def _provide(
        self, control: ControlPlane, plans: Sequence[_Plan], evicted: Sequence[Evicted]
    ) -> list[answers.DeployedModel]:
        """Request the missing replicas of models in one decision, which places the largest model first."""
        models = [(control.controller.models.put(plan.config), plan) for plan in plans]
        pairs = {
            (model, generation): plan for model, plan in models for generation in plan.generations
        }
        requests = []
        for model, generation in pairs:
            model.generations |= {generation}
            processor = control.dispatcher.processor(model, generation)
            processor.least_replicas = model.deployment.replicas
            processor.scale(model.deployment.replicas)
            requests.append(ReplicaRequest(model, generation, model.deployment.replicas))
            control.controller.dedicate(model)
        outcomes = await control.provide(requests, wait=self.wait, evicted=evicted)
        for index, (request, plan) in enumerate(zip(requests, pairs.values(), strict=True)):
            # Two names may turn out to be one model once it is loaded.
            if request.model.same_as is not None:
                change = DeploymentChange(request.model.config, plan.change.given)
                repeated = Deploy(
                    deployments=(change,), generation=request.generation, wait=self.wait
                )
                (outcomes[index],) = (await repeated.perform(control)).models
            elif plan.model is None:
                control.forget_unloadable(request.model)
            else:
                outcomes[index] = replace(outcomes[index], changes=plan.changes)
        return outcomes


@dataclass(frozen=True, slots=True)
class _Plan:
    """One model of a deployment, with its old and its new settings."""

    model: Model | None
    """The model; None for a new one."""
    before: DeploymentConfig | None
    """The old settings; None for a new model."""
    config: DeploymentConfig
    generations: Sequence[str]
    change: DeploymentChange

    @property
    def changes(self) -> tuple[SettingDifference, ...]:
        return () if self.before is None else tuple(differences(self.before, self.config))

    @property
    def is_changed(self) -> bool:
        """True if settings change that need new replicas; False for a booked model."""
        if self.model is None or self.before is None or self.model.scheduled is not None:
            return False
        return self.before.as_loaded != self.config.as_loaded

    def is_rollout(self, control: ControlPlane) -> bool:
        """Return True if the model has replicas that must be replaced."""
        replicas = control.controller.replicas()
        return self.is_changed and any(replica.model is self.model for replica in replicas)


class Evict(Operation):
    """Evict a model, or one replica of it, from its devices."""

    model_config = with_example({"model": "openai-community/gpt2", "cold": True})
    name, event = "evict", "EVICT"

    model: str | None = Field(default=None, min_length=1)
    replica: str | None = Field(default=None, min_length=1)
    """Id of the replica, or its beginning."""
    generation: Generation | None = None
    """The nnsight generation whose replicas are evicted; None: every generation."""
    cold: bool = False
    """Free the CPU memory as well."""
    all: bool = False
    """Evict every model, except the models that the calendar has deployed now."""

    async def perform(self, control: ControlPlane) -> answers.Evicted:
        if self.all == (self.model is not None) or (self.all and self.replica):
            raise OperationError(
                400, "Name either one model, and optionally a replica of it, or all."
            )
        if self.generation is not None and (self.all or self.replica):
            raise OperationError(
                400, "Give a generation only with one model and without a replica."
            )
        if self.model is None:
            return await self._evict_all(control)
        models = control.find(self.model)
        replica_id = None
        if self.replica is not None:
            existing = (
                replica for replica in control.controller.replicas() if replica.model in models
            )
            replica_id = _resolve_id(
                self.replica, (replica.placed.replica_id for replica in existing)
            )
        control.refuse_scheduled(models, replica_id)
        if replica_id is None:
            evicted = [
                key
                for model in models
                for key in await control.evict_model(
                    model, cold=self.cold, generation=self.generation
                )
            ]
        else:
            evicted = self._evict_replica(control, models, replica_id)
        if not evicted:
            names = ", ".join(sorted({model.config.repo_id for model in models}))
            suffix = "" if self.generation is None else f" for nnsight {self.generation}"
            raise OperationError(404, f"{names!r} has no replica{suffix} to evict.")
        return _evicted_answer(evicted)

    async def _evict_all(self, control: ControlPlane) -> answers.Evicted:
        evicted, scheduled = [], []
        for model in list(control.controller.models):
            if model.scheduled is not None:
                scheduled.append(model.config.repo_id)
            else:
                evicted += await control.evict_model(model, cold=self.cold)
        return _evicted_answer(evicted, scheduled)

    def _evict_replica(
        self, control: ControlPlane, models: Sequence[Model], replica_id: str
    ) -> list[Evicted]:
        keys = [
            replica.placed.key
            for replica in control.controller.replicas()
            if replica.model in models and replica.placed.replica_id == replica_id
        ]
        if not keys:
            raise OperationError(404, f"{self.model!r} has no replica {self.replica!r}.")
        hot = {d.key for d in control.controller.cluster.replicas() if d.level is _HOT}
        for variant in {Variant.parse(key[0]) for key in keys if key in hot}:
            processor = control.dispatcher.processors.get(variant)
            if processor is None:
                continue
            # Otherwise a new replica would be started in place of the evicted one.
            processor.desired_replicas = max(0, processor.desired_replicas - 1)
            processor.least_replicas = min(processor.least_replicas, processor.desired_replicas)
            if processor.model.keeps(variant.generation):
                processor.model.scale(variant.generation, processor.least_replicas)
        return list(control.controller.evict(replica_keys=keys, cold=self.cold))


class Scale(Operation):
    """Set a model's number of replicas."""

    model_config = with_example({"model": "openai-community/gpt2", "replicas": 2})
    name, event = "scale", "SCALE"

    model: str = Field(min_length=1)
    replicas: int = Field(ge=0)
    generation: Generation | None = None

    async def perform(self, control: ControlPlane) -> answers.Outcomes:
        models = control.find(self.model)
        control.refuse_scheduled(models)
        requests: list[ReplicaRequest] = []
        removed: list[answers.DeployedModel] = []
        for model in models:
            generations = self._generations(control, model)
            if not self.replicas and self.generation is None:
                model.config = replace(model.config, replicas=0)
                model.withdrawals += 1  # void requests for replicas that are not placed yet
            for generation in sorted(generations):
                if self.replicas or (self.generation is not None and model.keeps(generation)):
                    model.scale(generation, self.replicas)
                processor = control.dispatcher.processor(model, generation)
                processor.least_replicas = self.replicas
                evicted = processor.scale(self.replicas)
                request = ReplicaRequest(model, generation, self.replicas)
                if self.replicas:
                    requests.append(request)
                else:
                    model.problems.pop(generation, None)
                    removed.append(outcome_of(request, ProvisionResult(), evicted))
        outcomes = removed or await control.provide(requests, wait=False)
        return answers.Outcomes(models=outcomes)

    def _generations(self, control: ControlPlane, model: Model) -> set[str]:
        """Return the generations to scale: the given generation, or the generations in use."""
        if self.generation is not None:
            return {control.installed(self.generation)}
        processors = control.processors(model)
        generations = {processor.variant.generation for processor in processors}
        if self.replicas:
            # The operator's generations; else generations with replicas or requests; else any known.
            in_use = {
                processor.variant.generation for processor in processors if not processor.idle
            }
            generations = set(model.generations) or in_use or generations
        return generations or {control.installed(model.deployment.runtime)}


def _resolve_id(given: str, ids: Iterable[str]) -> str:
    """Return the id that begins with `given`, or `given` if none does; raise if several do."""
    matches = matching_ids(given, ids)
    if len(matches) > 1:
        raise OperationError(
            400, f"{given[:_MAX_QUOTED]!r} is the beginning of {len(matches)} ids: give more of it."
        )
    return matches[0] if matches else given


def _evicted_answer(keys: Iterable[Evicted], scheduled: Iterable[str] = ()) -> answers.Evicted:
    evicted = [answers.EvictedKey(model_key=key, replica_id=replica) for key, replica in keys]
    return answers.Evicted(evicted=evicted, scheduled=tuple(scheduled))


class Restart(Operation):
    """Replace a model's replicas with new ones."""

    model_config = with_example({"model": "openai-community/gpt2"})
    name, event = "restart", "RESTART"

    model: str = Field(min_length=1)
    generation: Generation | None = None
    """The nnsight generation whose replicas are restarted; None: every generation."""

    async def perform(self, control: ControlPlane) -> answers.Restarted:
        models = control.find(self.model)
        existing = [
            replica
            for replica in control.controller.replicas()
            if replica.model in models
            and self.generation in (None, Variant.parse(replica.placed.model_key).generation)
        ]
        if not existing:
            suffix = "" if self.generation is None else f" for nnsight {self.generation}"
            raise OperationError(404, f"{self.model!r} has no replica{suffix} to restart.")
        hot = [replica for replica in existing if replica.placed.level is _HOT]
        # If the model is only WARM, start one replica per generation.
        restarted = hot or list(
            {replica.placed.model_key: replica for replica in existing}.values()
        )
        counts = Counter(
            control.dispatcher.processor(
                replica.model, Variant.parse(replica.placed.model_key).generation
            )
            for replica in restarted
        )
        keys = [replica.placed.key for replica in existing]
        control.controller.evict(replica_keys=keys, cold=True, why=f"{OPERATOR_PREFIX}restarts it")
        requests = [processor.replica_requests(count) for processor, count in counts.items()]
        outcomes = await control.provide([batch[0] for batch in requests], wait=False)
        outcomes += await control.provide([batch[1] for batch in requests if batch[1:]], wait=False)
        if problems := [outcome.problem for outcome in outcomes if outcome.problem]:
            raise OperationError(409, problems[0])
        return answers.Restarted(
            restarted=[
                answers.ReplicaKey(
                    model_key=replica.placed.model_key, replica_id=replica.placed.replica_id
                )
                for replica in restarted
            ]
        )


class Kill(Operation):
    """Cancel a waiting or running request."""

    model_config = with_example({"request_id": "0d9ff6ea"})
    name, event = "kill", "KILL_REQUEST"

    request_id: str = Field(min_length=1)
    """Id of the request, or its beginning."""
    user: str | None = None
    """The user who cancels a request of their own; None: the operator."""

    async def perform(self, control: ControlPlane) -> answers.Killed:
        lifecycle = control.dispatcher.lifecycle
        held = [request.id for request in lifecycle.held]
        request_id = _resolve_id(self.request_id, held)
        job = lifecycle.job(request_id)
        if self.user not in (None, None if job is None else job.user):
            raise OperationError(
                404, f"No job {self.request_id[:_MAX_QUOTED]!r} of yours waits or runs here."
            )
        reason = _KILLED if self.user is None else _CANCELLED
        if not await control.dispatcher.cancel(request_id, reason):
            if request_id in held:
                raise OperationError(404, f"Request {request_id} had already ended.")
            raise OperationError(
                404,
                f"No request {self.request_id[:_MAX_QUOTED]!r} waits or runs here; `ndif queue` lists "
                "the requests that do.",
            )
        return answers.Killed(killed=True, request_id=request_id)


class KillKey(Operation):
    """Cancel the waiting and running requests of an API key."""

    model_config = with_example({"account": "5f1c0a9d3e7b46820c9d1e2f3a4b5c6d", "revoked": False})
    name, event = "kill/key", "KILL_KEY"

    account: str = Field(min_length=1)
    """Digest by which the server counts the key's requests (`account` in `GET /admin/keys`)."""
    revoked: bool = False
    """True if the key was revoked: the ERROR says so, and requests that gateways still accept end, too."""

    async def perform(self, control: ControlPlane) -> answers.KilledJobs:
        reason, for_s = (_REVOKED, _LATE_REQUESTS_S) if self.revoked else (_KILLED, 0.0)
        killed = await control.dispatcher.cancel_all(self.account, reason, for_s)
        return answers.KilledJobs(killed=killed)


class GetJobs(Operation):
    """The unfinished jobs, and the last ended jobs."""

    model_config = with_example({"limit": 100})
    name, event = "jobs", "JOBS"

    user: str | None = Field(default=None, pattern=_NO_NUL)
    """Only the jobs of this user; None: of all users."""
    limit: int = Field(default=100, ge=1, le=1000)
    """Maximum number of ended jobs."""

    async def perform(self, control: ControlPlane) -> JobList:
        unfinished = unfinished_jobs(control.dispatcher, self.user)
        ended = await _read_usage(control.usage.recent(self.user, self.limit))
        ids = {job.id for job in unfinished}
        return JobList(
            jobs=[*unfinished, *(JobState.of(record) for record in ended if record.id not in ids)]
        )


class GetTrace(Operation):
    """The steps of one waiting, running or ended job."""

    model_config = with_example({"job_id": A_JOB, "user": "ada@example.org"})
    name, event = "trace", "TRACE"

    job_id: str = Field(pattern=_NO_NUL)
    """The job's full id."""
    user: str | None = Field(default=None, pattern=_NO_NUL)
    """The user who must own the job; None: any user."""

    async def perform(self, control: ControlPlane) -> Trace:
        job = control.dispatcher.lifecycle.job(self.job_id)
        if job is not None and job.state is not None:
            trace: Trace | None = trace_of(job.request, job.state, job.steps_now())
        else:
            record = await _read_usage(control.usage.find(self.job_id))
            trace = None if record is None else Trace.of(record)
        # A job of another user gets the same answer as a missing job, so that its existence stays hidden.
        if trace is None or self.user not in (None, trace.user):
            raise OperationError(
                404,
                f"There is no job {self.job_id[:_MAX_QUOTED]!r}, or its record is no longer kept.",
            )
        return trace


class GetUsage(Operation):
    """Ended jobs and their cost, by user, model or day."""

    model_config = with_example({"by": "model", "since": "2026-07-01"})
    name, event = "usage", "USAGE"

    by: Group = "user"
    since: str | None = Field(default=None, pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    """First day that counts, as YYYY-MM-DD in UTC; None: all."""
    user: str | None = Field(default=None, pattern=_NO_NUL)
    """Count only the jobs of this user; None: of all users."""

    async def perform(self, control: ControlPlane) -> answers.UsageReport:
        try:
            since = None if self.since is None else date.fromisoformat(self.since)
        except ValueError as error:
            raise OperationError(400, f"There is no day {self.since!r}.") from error
        totals = await _read_usage(control.usage.totals(self.by, since, self.user))
        return answers.UsageReport(by=self.by, since=self.since, usage=totals)


class CollectGarbage(Operation):
    """Delete expired results, responses and records of jobs now; the server also does so regularly."""

    model_config = with_example({"dry_run": True})
    name, event = "gc", "GC"

    dry_run: bool = False
    """Count the expired entries without deleting them."""

    async def perform(self, control: ControlPlane) -> answers.Collected:
        before = time.time() - control.retention_s
        try:
            expired = dict(await control.responder.sweep(dry=self.dry_run))
        except ObjectStoreError as error:
            raise OperationError(503, f"Nothing can be deleted now: {error}.") from error
        expired["records"] = await _read_usage(control.usage.sweep(before, dry=self.dry_run))
        return answers.Collected(expired=expired, dry_run=self.dry_run)


async def _read_usage(reading: Awaitable[T]) -> T:
    try:
        return await reading
    except UsageUnavailableError as error:
        raise OperationError(
            503, f"The record of jobs cannot be read now: {error}. Try again in a moment."
        ) from error


class ListKept(Operation):
    """The deployed and booked repositories, which stay in each node's cache of the Hub."""

    name, event, method = "cache", "CACHE", "GET"

    async def perform(self, control: ControlPlane) -> answers.KeptRepositories:
        return answers.KeptRepositories(kept=control.reconciler.kept_repositories())


class ListCallbacks(Operation):
    """Webhooks and mails that wait for delivery or were given up."""

    name, event, method = "callbacks", "CALLBACKS", "GET"

    async def perform(self, control: ControlPlane) -> Callbacks:
        try:
            return await control.callbacks.describe()
        except BrokerError as error:
            raise OperationError(503, f"The webhooks and mails cannot be read: {error}.") from error


class RetryCallbacks(Operation):
    """Send webhooks and mails again at once."""

    model_config = with_example({"all": True})
    name, event = "callbacks/retry", "RETRY_CALLBACKS"

    request_id: str | None = Field(default=None, min_length=1, pattern=_NO_NUL)
    """Id of the request, or its beginning."""
    all: bool = False
    """Send every given-up webhook and mail again."""

    async def perform(self, control: ControlPlane) -> answers.Retried:
        if self.all == (self.request_id is not None):
            raise OperationError(400, "Name either one request, or all.")
        try:
            return answers.Retried(retried=await self._retry(control.callbacks))
        except BrokerError as error:
            raise OperationError(
                503, f"The webhooks and mails cannot be reached: {error}."
            ) from error

    async def _retry(self, callbacks: CallbackDelivery) -> list[str]:
        if self.request_id is None:
            return await callbacks.retry(None)
        matches = await callbacks.queue.find(self.request_id)
        if not matches:
            raise OperationError(
                404,
                f"No webhook or mail of a request {self.request_id[:_MAX_QUOTED]!r} waits or was given up; "
                "`ndif callbacks list` lists them.",
            )
        return await callbacks.retry(_resolve_id(self.request_id, {f.request_id for f in matches}))


class ListAlerts(Operation):
    """Open incidents of the server's alerts, incidents of the last day, and the recipients."""

    name, event, method = "alerts", "ALERTS", "GET"

    async def perform(self, control: ControlPlane) -> AlertsState:
        return _alerts_of(control).describe()


class SendTestAlerts(Operation):
    """Send a test message to every recipient of alerts."""

    name, event = "alerts/test", "TEST_ALERTS"

    async def perform(self, control: ControlPlane) -> TestedAlerts:
        return await _alerts_of(control).test()


def _alerts_of(control: ControlPlane) -> Alerts:
    if control.alerts is None:
        raise OperationError(
            409,
            "This server sends no alerts: set NDIF_ALERT_WEBHOOKS or NDIF_ALERT_EMAIL, and restart it.",
        )
    return control.alerts


class ListEvents(Operation):
    """The last events: deployments, evictions, changes of keys and tiers, logins, and their authors."""

    name, event, method = "events", "EVENTS", "GET"

    async def perform(self, control: ControlPlane) -> answers.Events:
        return answers.Events(events=control.events.latest())


class Stop(Operation):
    """Stop the server as SIGTERM does."""

    name, event = "stop", "STOP"

    async def perform(self, control: ControlPlane) -> answers.Stopping:
        control.stop()
        return answers.Stopping(stopping=True)


OPERATIONS: tuple[type[Operation], ...] = tuple(Operation.__subclasses__())
"""All operations, in the order of this file."""

Perform = Callable[[Operation], Awaitable[Any]]
"""The type of `ndif.control.leader.Leader.perform`."""


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse_operation(kind: type[Parsed], content: bytes | Mapping[str, Any]) -> Parsed:
    """Return the operation of JSON or a mapping; raise an OperationError that names a wrong field."""
    try:
        if isinstance(content, bytes):
            return kind.model_validate_json(content)
        return kind.model_validate(content)
    except DeploymentFileError as error:
        raise OperationError(400, str(error)) from error
    except ValidationError as error:
        first = problems(error)[0]
        field = str(first.location[0]) if first.location else "the body"
        hint = f"; there are: {', '.join(kind.model_fields)}" if first.is_unknown else ""
        raise OperationError(
            400, f"The request is not valid: {field[:_MAX_QUOTED]}: {first.reason}{hint}."
        ) from error
