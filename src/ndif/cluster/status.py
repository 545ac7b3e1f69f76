"""Views of models and replicas for clients and operators, and for publication to gateways."""

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
    """Return the answer of `GET /status`, in a form that every client generation reads.

    The answer lists models with replicas, models that an operator named, and models of the calendar's
    `coming` windows. A model that only users requested is listed once it has a replica.
    """
    replicas = controller.replicas()
    nodes = {node.id: node.name for node in controller.cluster.nodes.values()}
    windows: dict[int, list[Window]] = {}
    scheduled: dict[ModelKey, Model] = {}
    for window in coming:
        key = window.config.key
        booked = controller.models.find(key) or scheduled.setdefault(
            key, _booked_model(window.config)
        )
        windows.setdefault(id(booked), []).append(window)
    entries = []
    for model in (*controller.models, *scheduled.values()):
        own_replicas = [replica for replica in replicas if replica.model is model]
        if own_replicas or model.dedicated or not model.on_demand or id(model) in windows:
            own_windows = windows.get(id(model), ())
            entries.append(_entry(model, own_replicas, nodes, own_windows, probes or Histories()))
    deployments: dict[str, ModelStatus] = {}
    for entry in _in_order(entries):
        deployments[entry.model_key] = entry
        # Clients of 0.8 count a model's replicas by its entries.
        for number in range(2, max(entry.replicas.values(), default=0) + 1):
            deployments[f"{entry.model_key}#{number}"] = entry
    return ServerStatus(deployments=deployments)


def _booked_model(config: DeploymentConfig) -> Model:
    return Model(config.key, replace(config, dedicated=False), on_demand=True)


def _in_order(entries: Iterable[ModelStatus]) -> list[ModelStatus]:
    """Return the entries in an order in which clients of 0.6 and 0.7 find the best entry.

    Their `is_model_running` takes the first entry of a repository and revision; their `status` shows the
    last entry of a repository, regardless of its revision.
    """
    best: dict[tuple[str, str], int] = {}
    ranked = []
    for entry in entries:
        rank = _ALL.index(entry.state)
        checkpoint = entry.repo_id, entry.revision or ""
        best[checkpoint] = min(rank, best.get(checkpoint, rank))
        ranked.append((checkpoint, rank, entry))
    ranked.sort(key=lambda row: (row[0][0], -best[row[0]], row[0][1], row[1]))
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
    for generation in sorted({replica.generation for replica in replicas} | model.problems.keys()):
        of_generation = [replica for replica in replicas if replica.generation == generation]
        serving[generation] = sum(replica.serving for replica in of_generation)
        states[generation] = _state(of_generation, has_problem=generation in model.problems)
    state = _best(states.values())
    if model.deploying and state is not ReplicaState.RUNNING:
        state = ReplicaState.DEPLOYING  # it is being measured, or memory is being freed for it
    probed = {
        generation: probes.public(Target.of(key, generation))
        for generation in (*states, *model.generations)
    }
    booked = [
        ScheduledWindow(start=window.start.isoformat(), end=window.end.isoformat())
        for window in windows
    ]
    # Clients of 0.7 show a model as Scheduled if it has a schedule and `dedicated` is None.
    is_dedication_shown = model.config.dedicated or not windows
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
        nodes=sorted(
            {nodes.get(replica.placed.node_id, replica.placed.node_id) for replica in replicas}
        ),
        parameters=model.parameters,
        config=None if model.architecture is None else dict(model.architecture),
        probes={generation: probe for generation, probe in probed.items() if probe is not None}
        or None,
        schedule=booked or None,
        dedicated=model.dedicated if is_dedication_shown else None,
    )


def _level(model: Model, replicas: Iterable[Replica]) -> DeploymentLevel:
    """Return the best level of the replicas; without replicas, HOT for a dedicated or deploying model."""
    levels = {replica.placed.level for replica in replicas}
    if DeploymentLevel.HOT in levels or (not levels and (model.dedicated or model.deploying)):
        return DeploymentLevel.HOT
    return DeploymentLevel.WARM if levels else DeploymentLevel.COLD


def _state(replicas: Iterable[Replica], *, has_problem: bool) -> ReplicaState:
    """Return the state that clients of one generation see, given its replicas."""
    state = _best(replica.state for replica in replicas)
    return ReplicaState.UNHEALTHY if has_problem and state is ReplicaState.NOT_STARTED else state


def _best(states: Iterable[ReplicaState]) -> ReplicaState:
    present = set(states)
    return next((state for state in _BEST_FIRST if state in present), ReplicaState.NOT_STARTED)


def describe_details(models: Models, key: ModelKey) -> ModelDetails:
    """Return the details of a model; empty details if the model is no longer known."""
    model = next((model for model in models if model.key == key), None)
    if model is None:
        return ModelDetails(structures={}, load_s={})
    return ModelDetails(structures=dict(model.structures), load_s=dict(model.load_s))


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """The facts of a model that a gateway needs to admit requests for the model."""

    key: str
    config: DeploymentConfig
    on_demand: bool
    scheduled: DeploymentConfig | None
    aliases: tuple[str, ...]
    gated: bool
    on_branch: bool
    deploying: int
    loaded: tuple[str, ...]
    """The generations in which the model is loaded."""


def publish(models: Models) -> list[PublishedModel]:
    """Return models in the form that gateways read; `read` is the inverse."""
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
    """Return the models that `publish` was given; `repositories` decides which models users may load."""
    models = Models(repositories=repositories)
    loaded = []
    for entry in published:
        key = ModelKey.parse(entry.key)
        loaded += [str(Variant(key, generation)) for generation in entry.loaded]
        models.add(project(Model, entry, key=key, aliases=set(entry.aliases)))
    models.note_loaded(loaded)
    return models
