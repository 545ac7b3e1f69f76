"""Models and replicas as clients and operators see them, and as a leader publishes them to gateways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ndif.cluster.controller import Controller
from ndif.cluster.models import Model, Models
from ndif.cluster.replica import Replica
from ndif.probe.history import Histories
from ndif.probe.probe import Target
from ndif.schedule.schedule import Window
from ndif.schema.answer import project
from ndif.schema.client_status import ModelStatus, ScheduledWindow, ServerStatus
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey, Variant
from ndif.schema.repositories import Repositories
from ndif.schema.states import DeploymentLevel, ReplicaState
from ndif.schema.structure import ModelDetails

_BEST_FIRST = (ReplicaState.RUNNING, ReplicaState.DEPLOYING, ReplicaState.UNHEALTHY)
_ALL = (*_BEST_FIRST, ReplicaState.NOT_STARTED)


def client_status(
    controller: Controller, coming: Sequence[Window] = (), probes: Histories | None = None
) -> ServerStatus:
    """Return the answer of `GET /status`, in the form that every client generation reads.

    Listed are models with replicas, models that an operator named, and models of the calendar's `coming`
    windows. A model that only users requested is listed once it has a replica.
    """
    replicas = controller.replicas()
    nodes = {node.id: node.name for node in controller.cluster.nodes.values()}
    windows: dict[int, list[Window]] = {}
    scheduled: dict[ModelKey, Model] = {}
    for window in coming:
        key = window.config.key
        found = controller.models.find(key) or scheduled.setdefault(key, _to_come(window.config))
        windows.setdefault(id(found), []).append(window)
    entries = []
    for model in (*controller.models, *scheduled.values()):
        mine = [each for each in replicas if each.model is model]
        if mine or model.dedicated or not model.on_demand or id(model) in windows:
            of_model = windows.get(id(model), ())
            entries.append(_entry(model, mine, nodes, of_model, probes or Histories()))
    deployments: dict[str, ModelStatus] = {}
    for entry in _in_order(entries):
        deployments[entry.model_key] = entry
        # Clients of 0.8 count a model's replicas by its entries.
        for number in range(2, max(entry.replicas.values(), default=0) + 1):
            deployments[f"{entry.model_key}#{number}"] = entry
    return ServerStatus(deployments=deployments)


def _to_come(config: DeploymentConfig) -> Model:
    return Model(config.key, replace(config, dedicated=False), on_demand=True)


def _in_order(entries: Iterable[ModelStatus]) -> list[ModelStatus]:
    """Return the entries in the order in which clients of 0.6 and 0.7 find the better of several.

    Their `is_model_running` takes the first of one repository and revision; their `status` shows the last
    of one repository, whatever its revision.
    """
    best: dict[tuple[str, str], int] = {}
    ranked = []
    for entry in entries:
        rank = _ALL.index(entry.state)
        checkpoint = entry.repo_id, entry.revision or ""
        best[checkpoint] = min(rank, best.get(checkpoint, rank))
        ranked.append((checkpoint, rank, entry))
    ranked.sort(key=lambda one: (one[0][0], -best[one[0]], one[0][1], one[1]))
    return [entry for _, _, entry in ranked]


def _entry(
    model: Model,
    replicas: Sequence[Replica],
    nodes: Mapping[str, str],
    windows: Sequence[Window],
    probes: Histories,
) -> ModelStatus:
    key = model.config.key
    serving, states = {}, {}
    for generation in sorted({each.generation for each in replicas} | model.problems.keys()):
        mine = [each for each in replicas if each.generation == generation]
        serving[generation] = sum(each.serving for each in mine)
        states[generation] = _state(mine, has_problem=generation in model.problems)
    state = _best(states.values())
    if model.deploying and state is not ReplicaState.RUNNING:
        state = ReplicaState.DEPLOYING  # its size is being worked out, or room made for it
    probed = {each: probes.public(Target.of(key, each)) for each in (*states, *model.generations)}
    booked = [
        ScheduledWindow(start=window.start.isoformat(), end=window.end.isoformat())
        for window in windows
    ]
    # Clients of 0.7 call a model Scheduled if it has a schedule and `dedicated` is None.
    is_told = model.config.dedicated or not windows
    return ModelStatus(
        model_key=str(key),
        repo_id=key.repo_id,
        revision=key.revision,
        task=key.task,
        trust_remote_code=model.config.trust_remote_code,
        on_demand=model.on_demand,
        deployment_level=_level(model, replicas),
        application_state=state.for_clients,
        state=state,
        replicas=serving,
        runtimes=states,
        nodes=sorted({nodes.get(each.placed.node_id, each.placed.node_id) for each in replicas}),
        parameters=model.parameters,
        config=None if model.architecture is None else dict(model.architecture),
        probes={each: found for each, found in probed.items() if found is not None} or None,
        schedule=booked or None,
        dedicated=model.dedicated if is_told else None,
    )


def _level(model: Model, replicas: Iterable[Replica]) -> DeploymentLevel:
    """Return the best level of the replicas; without any, HOT for a dedicated or deploying model."""
    levels = {each.placed.level for each in replicas}
    if DeploymentLevel.HOT in levels or (not levels and (model.dedicated or model.deploying)):
        return DeploymentLevel.HOT
    return DeploymentLevel.WARM if levels else DeploymentLevel.COLD


def _state(replicas: Iterable[Replica], *, has_problem: bool) -> ReplicaState:
    """Return the state that clients of these replicas' generation see."""
    state = _best(each.state for each in replicas)
    return ReplicaState.UNHEALTHY if has_problem and state is ReplicaState.NOT_STARTED else state


def _best(states: Iterable[ReplicaState]) -> ReplicaState:
    there = set(states)
    return next((state for state in _BEST_FIRST if state in there), ReplicaState.NOT_STARTED)


def describe_details(models: Models, key: ModelKey) -> ModelDetails:
    """Return the details of a model; empty details if it is no longer known."""
    model = next((each for each in models if each.key == key), None)
    if model is None:
        return ModelDetails(structures={}, load_s={})
    return ModelDetails(structures=dict(model.structures), load_s=dict(model.load_s))


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """The facts of a model that a gateway needs to admit requests for it."""

    key: str
    config: DeploymentConfig
    on_demand: bool
    scheduled: DeploymentConfig | None
    aliases: tuple[str, ...]
    gated: bool
    on_branch: bool
    deploying: int
    loaded: tuple[str, ...]
    """The generations for which it is loaded."""


def publish(models: Models) -> list[PublishedModel]:
    """Return models in the form for gateways; `read` is the inverse."""
    return [
        project(
            PublishedModel,
            model,
            key=str(model.key),
            aliases=tuple(sorted(model.aliases)),
            loaded=tuple(sorted(models.loaded_in(model))),
        )
        for model in models
    ]


def read(published: Sequence[PublishedModel], repositories: Repositories) -> Models:
    """Return the models that `publish` was given; users may have those of `repositories` loaded."""
    models = Models(repositories=repositories)
    loaded = []
    for one in published:
        key = ModelKey.parse(one.key)
        loaded += [str(Variant(key, generation)) for generation in one.loaded]
        models.add(project(Model, one, key=key, aliases=set(one.aliases)))
    models.note_loaded(loaded)
    return models
