"""The models that a server serves or may load, by the names that clients use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ndif.schema.deployment import DeploymentConfig, explain_mismatch
from ndif.schema.model_key import ModelKey
from ndif.schema.repositories import GATED, Repositories
from ndif.schema.structure import ModelStructure
from ndif.telemetry.model_labels import MODELS

_REPO_ID = re.compile(r"[\w\-][\w.\-]{0,95}(/[\w\-][\w.\-]{0,95})?", re.ASCII)
_MOST_NAMED = 20
_MOST_ON_DEMAND = 1000
_NO_HOTSWAPPING = (
    "Loading a model on demand needs the right `hotswapping`, which you do not have: ask the "
    "server's operator for it."
)


def is_repo_id(name: str) -> bool:
    """Return True if a name has the form of a repository id and is not a path on this machine."""
    return _REPO_ID.fullmatch(name) is not None and not Path(name).exists()


class NotServedError(Exception):
    """The client may not use the model; the message explains which models it may use."""


@dataclass(slots=True, eq=False)
class Model:
    """One model and its settings, across generations.

    Operators, the schedule and users change its settings; the controller creates its replicas.
    """

    key: ModelKey
    """Key of the first request for the model, which names the model's queues and replicas permanently."""
    config: DeploymentConfig
    """Settings; once known, with the task and with the repository id in the hub's spelling."""
    on_demand: bool = False
    """True if only users, and no operator, have requested the model."""
    scheduled: DeploymentConfig | None = None
    """Settings of the current booking; None if the model is not booked now."""
    deploying: int = 0
    """Number of decisions and rollouts in progress for its replicas."""
    withdrawals: int = 0
    """Number of evictions by an operator; an eviction voids earlier requests for replicas."""
    generations: frozenset[str] = frozenset()
    """Generations for which an operator deployed the model; empty if undecided."""
    problems: dict[str, str] = field(default_factory=dict)
    """Reason why the last deployment failed, by generation."""
    aliases: set[str] = field(default_factory=set)
    """Further repository ids of the same model, in lower case."""
    gated: bool = False
    """True if the hub is known to restrict access to the model."""
    on_branch: bool = True
    """False if the hub says that no branch or tag contains its commit; a pull request may."""
    parameters: int | None = None
    """Number of parameters, once the model was measured or loaded."""
    architecture: Mapping[str, Any] | None = None
    """Content of the checkpoint's `config.json`, once the model was loaded."""
    structures: dict[str, ModelStructure] = field(default_factory=dict)
    """The model's tree of modules by generation, once the model was measured or loaded."""
    load_s: dict[str, float] = field(default_factory=dict)
    """Duration of the last load from disk in seconds, by generation."""
    same_as: Model | None = None
    """The model that this one turned out to be, and that is served instead."""
    _names: tuple[DeploymentConfig, int, frozenset[str]] | None = None
    """Cache of `names`, with the settings and the number of aliases that the names were built from."""

    @property
    def dedicated(self) -> bool:
        """Return True if every user may use the model, and no other model evicts it."""
        return self.config.dedicated or self.scheduled is not None

    @property
    def deployment(self) -> DeploymentConfig:
        """Return the settings in force now: the booking's settings, or else the model's own."""
        if self.scheduled is None:
            return self.config
        return replace(self.scheduled, dedicated=True, task=self.scheduled.task or self.config.task)

    @property
    def provides_files(self) -> bool:
        """Return True if clients build the model from its files; False for a revision that a user chose."""
        return not (self.on_demand and self.config.revision)

    def keeps(self, generation: str) -> bool:
        """Return True if an operator or the calendar requests the model in this generation."""
        if self.scheduled is not None and self.scheduled.deployed_for:
            return generation in self.scheduled.deployed_for
        return not self.generations or generation in self.generations

    def dedicated_in(self, generation: str) -> int:
        """Return the number of dedicated replicas in this generation."""
        return self.deployment.replicas if self.dedicated and self.keeps(generation) else 0

    def least_in(self, generation: str) -> int:
        """Return the initial number of replicas for the model's queue in this generation."""
        return self.deployment.replicas if self.keeps(generation) else 1

    def scale(self, generation: str, replicas: int) -> None:
        """Set an operator's number of replicas in this generation; 0 does not change other generations."""
        others = self.generations - {generation}
        if replicas:
            self.generations = others | {generation}
        elif others:
            self.generations = others
            return
        self.config = replace(self.config, replicas=replicas)

    @property
    def forgettable(self) -> bool:
        """Return True if the model can be forgotten without loss."""
        return self.on_demand and self.scheduled is None and not self.deploying

    def named(self, key: ModelKey) -> bool:
        """Return True if a client's `key` names the model."""
        if key == self.key:
            return True
        if not self.called(key.repo_id):
            return False
        return explain_mismatch(self.config, replace(key, repo_id=self.config.repo_id)) is None

    def called(self, repo_id: str) -> bool:
        """Return True if the model has this repository id: the first one, the hub's, or an alias."""
        return repo_id.lower() in self.names

    @property
    def names(self) -> frozenset[str]:
        """Return the model's repository ids, in lower case."""
        cached = self._names
        if cached is None or cached[0] is not self.config or cached[1] != len(self.aliases):
            first, hub = self.key.repo_id.lower(), self.config.repo_id.lower()
            cached = self.config, len(self.aliases), frozenset((first, hub, *self.aliases))
            self._names = cached
        return cached[2]


class Models:
    """The models of one server. Finds and admits models; does not manage replicas."""

    def __init__(
        self,
        configs: Iterable[DeploymentConfig] = (),
        *,
        fixed: bool = False,
        repositories: Repositories | None = None,
    ) -> None:
        self.fixed = fixed
        """True if no request can load another model."""
        self._repositories = repositories or Repositories()
        self._loaded: dict[str, frozenset[str]] = {}
        """Generations with a replica on a device, by the model's key as a string."""
        self._models: list[Model] = []
        for config in configs:
            self.put(config)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def add(self, model: Model) -> None:
        """Add an unknown model."""
        self._models.append(model)
        self._name_in_metrics(model)

    def put(self, config: DeploymentConfig) -> Model:
        """Set an operator's settings of a model, and return the model."""
        model = self.find(config.key)
        if model is None:
            model = Model(config.key, config)
            self.add(model)
        else:
            model.config, model.on_demand = config, False
            self._name_in_metrics(model)
        return model

    def find(self, key: ModelKey) -> Model | None:
        """Return the model that `key` names; None if the model is unknown."""
        # Each request searches all models, so their names are compared first.
        name = key.repo_id.lower()
        named = [model for model in self._models if name in model.names and model.named(key)]
        # A dedicated model is preferred to a model that a user requested.
        return min(named, key=lambda model: (model.key != key, not model.dedicated), default=None)

    def as_known(self, config: DeploymentConfig) -> DeploymentConfig:
        """Return `config` with the known names of its model: the hub's name, and the model's folder."""
        model = self.find(config.key)
        if model is None or not model.called(
            config.checkpoint
        ):  # else the checkpoint is in another folder
            return config
        settings = model.config
        return replace(
            config,
            repo_id=settings.repo_id,
            checkpoint=settings.checkpoint,
            task=config.task or settings.task,
        )

    def unite(self, model: Model) -> None:
        """Merge a model without replicas into another model with its newly learned name, if one exists."""
        key = replace(model.key, repo_id=model.config.repo_id)
        others = [other for other in self._models if other is not model and other.named(key)]
        if model not in self._models or not others:
            return
        self._models.remove(model)
        model.same_as = min(others, key=lambda other: (other.key != key, not other.dedicated))
        model.same_as.aliases |= {model.key.repo_id.lower(), *model.aliases}
        model.on_demand, model.scheduled = True, None  # and can be forgotten

    def note_loaded(self, variants: Iterable[str]) -> None:
        """Record the variants, as strings, that have a replica on a device, up or loading."""
        loaded: dict[str, frozenset[str]] = {}
        for variant in variants:
            key, _, generation = variant.rpartition("@")
            loaded[key] = loaded.get(key, frozenset()) | {generation}
        new = {ModelKey.parse(key) for key in loaded.keys() - self._loaded.keys()}
        self._loaded = loaded
        for model in self._models:
            if model.key in new:
                self._name_in_metrics(model)

    def loaded_in(self, model: Model) -> frozenset[str]:
        """Return the generations in which a model has a replica on a device, up or loading."""
        return self._loaded.get(str(model.key), frozenset())

    def is_open(self, model: Model, generation: str | None = None) -> bool:
        """Return True if every user may use a model now, in this generation or in any.

        A dedicated model is open. Any other model that an operator deployed is open while it is loaded or
        being deployed.
        """
        if model.dedicated:
            return True
        if model.deploying and not model.on_demand:
            return True
        loaded = self.loaded_in(model)
        is_loaded = bool(loaded) if generation is None else generation in loaded
        return is_loaded and not model.on_demand

    def of(self, key: ModelKey) -> Model:
        """Return the model whose `Model.key` is `key`; raise a `KeyError` if there is none."""
        for model in self._models:
            if model.key == key:
                return model
        raise KeyError(str(key))

    def called(self, name: str) -> list[Model]:
        """Return the models that an operator names by a repository id or a full key."""
        if "{" in name:
            key = ModelKey.parse(name)
            return [model for model in self._models if model.named(key)]
        return [model for model in self._models if model.called(name)]

    def forget(self, model: Model) -> None:
        """Forget a model that only users requested and that has no deployment in progress."""
        if model.forgettable and model in self._models:
            self._models.remove(model)

    def admit(
        self,
        key: ModelKey,
        generation: str,
        *,
        hotswapping: bool,
        gated: bool = False,
        keep: bool = True,
    ) -> Model:
        """Return the model that a client names: an open model, or any model if the client may hotswap.

        A new model is added only with `keep`, once its request is accepted. If the client may not use the
        model, raise a `NotServedError` with a sentence for the client.
        """
        model = self.find(key)
        if model is not None and self.is_open(model, generation):
            return model
        if not hotswapping:
            raise NotServedError(self.not_open(key, model, generation))
        if why := self.not_permitted(key, model, gated=gated):
            raise NotServedError(why)
        if model is not None:
            return model
        if not is_repo_id(key.repo_id):
            raise NotServedError(
                f"{key.repo_id[:200]!r} names no repository. Use the model's id on "
                "the Hugging Face Hub, like openai-community/gpt2."
            )
        config = DeploymentConfig(key.repo_id, key.repo_id, key.revision, key.task)
        if sum(model.on_demand for model in self._models) >= _MOST_ON_DEMAND:
            raise NotServedError(
                f"{_MOST_ON_DEMAND} models are loaded on demand, or wait for that. Try again in a minute."
            )
        model = Model(key, config, on_demand=True)
        if keep:
            self._models.append(model)
        return model

    def not_permitted(self, key: ModelKey, model: Model | None, *, gated: bool) -> str | None:
        """Return the reason why a client may not load a model on demand, as a sentence; None if it may.

        `model` is None if the model is unknown. Every client may load a model that an operator deployed.
        `gated`: True if the client may use gated models.
        """
        if model is not None and (model.dedicated or not model.on_demand):
            return None
        names = [key.repo_id] if model is None else [key.repo_id, model.config.repo_id]
        if why := self._repositories.refusal(*names):
            return why
        on_branch = model is None or model.on_branch
        if why := self._repositories.revision_refusal(key.revision, on_branch=on_branch):
            return why
        if model is not None and model.gated and not gated:
            return GATED.format(repo_id=model.config.repo_id)
        return None

    def not_open(self, key: ModelKey, model: Model | None, generation: str) -> str:
        """Return the refusal for a client that may not load models on demand and has named `model`."""
        served = [model.deployment for model in self._models if self.is_open(model)]
        same_repository = [
            config for config in served if config.repo_id.lower() == key.repo_id.lower()
        ]
        if model is not None and self.is_open(model):
            loaded = ", ".join(sorted(self.loaded_in(model)))
            answer = (
                f"{key.repo_id[:200]!r} is loaded for clients of nnsight {loaded} now, not for clients of "
                f"{generation}."
            )
        elif len(served) == 1 or same_repository:
            answer = (
                explain_mismatch((same_repository or served)[0], key) or "This model is not served."
            )
        elif not served:
            answer = (
                f"{key.repo_id[:200]!r} is not served: no model is deployed on this server now."
            )
        else:
            names = sorted({repr(config.repo_id) for config in served})
            if len(names) > _MOST_NAMED:
                names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} others (see /status)"]
            listed = ", ".join(names)
            answer = (
                f"{key.repo_id[:200]!r} is not deployed on this server. Deployed models: {listed}."
            )
        return answer if self.fixed else f"{answer} {_NO_HOTSWAPPING}"

    def schedule(self, configs: Iterable[DeploymentConfig]) -> tuple[list[Model], list[Model]]:
        """Set the booked models; return models with new or changed bookings, and with ended bookings."""
        scheduled: dict[int, DeploymentConfig] = {}
        for config in configs:
            model = self.find(config.key)
            if model is None:
                model = Model(config.key, replace(config, dedicated=False), on_demand=True)
                self._models.append(model)
            scheduled[id(model)] = config
        ended = [m for m in self._models if m.scheduled is not None and id(m) not in scheduled]
        begun = [m for m in self._models if id(m) in scheduled and m.scheduled != scheduled[id(m)]]
        for model in self._models:
            model.scheduled = scheduled.get(id(model))
        for model in begun:
            self._name_in_metrics(model)
        return begun, ended

    def learn(
        self,
        model: Model,
        repo_id: str | None,
        task: str | None,
        parameters: int | None = None,
        architecture: Mapping[str, Any] | None = None,
        *,
        gated: bool = False,
        on_branch: bool = True,
    ) -> None:
        """Record facts from a model's files: its name in the hub's spelling, its task, size and config."""
        model.gated = gated or model.gated
        model.on_branch = on_branch and model.on_branch
        model.parameters = parameters or model.parameters
        model.architecture = architecture or model.architecture
        model.config = replace(
            model.config, repo_id=repo_id or model.config.repo_id, task=model.config.task or task
        )
        self._name_in_metrics(model)

    def _name_in_metrics(self, model: Model) -> None:
        """Give a model a label of its own in metrics, if it is deployed, or has a replica on a device."""
        label = model.config.key.label
        names = label, model.key.label
        if not model.on_demand or model.scheduled is not None:
            MODELS.add_deployed(label, names)
        elif self.loaded_in(model):
            MODELS.add_loaded(label, names)
