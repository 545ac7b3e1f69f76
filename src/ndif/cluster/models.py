"""Models: what this server serves or may serve, by the names that clients use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ndif.schema.deployment import DeploymentConfig, refusal
from ndif.schema.model_key import ModelKey

_REPO_ID = re.compile(r"[\w\-][\w.\-]{0,95}(/[\w\-][\w.\-]{0,95})?", re.ASCII)
_MOST_NAMED = 20
_MOST_ON_DEMAND = 1000


class NotServedError(Exception):
    """A model that is not served to whoever asks for it; the message says which are."""


@dataclass(slots=True, eq=False)
class Model:
    """One model, and how it is to be loaded."""

    key: ModelKey
    """What it was first called: it names its lines and replicas for good."""
    config: DeploymentConfig
    """Its repo id as a hub spells it, and its task, once they are known."""
    on_demand: bool = False
    """Nobody but a user has asked for it."""
    booked: DeploymentConfig | None = None
    """What the schedule has it dedicated as, now."""
    deploying: int = 0
    """How many are about to deploy it."""
    withdrawals: int = 0
    """How often its operator has taken it away: what was asked for before is not to come."""
    generations: frozenset[str] = frozenset()
    """In which its operator has it; none: that has yet to be said, and any may be meant."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why it could not be deployed when that was last tried, by generation."""
    aliases: set[str] = field(default_factory=set)
    """Further repo ids that turned out to mean it, in small letters."""
    same_as: Model | None = None
    """The one that it turned out to be, and that is served in its place."""

    @property
    def dedicated(self) -> bool:
        """Whether everybody may use it, and nobody displaces it."""
        return self.config.dedicated or self.booked is not None

    @property
    def wanted(self) -> DeploymentConfig:
        """How it is to be deployed now."""
        if self.booked is None:
            return self.config
        return replace(self.booked, dedicated=True, task=self.booked.task or self.config.task)

    def keeps(self, generation: str) -> bool:
        """Whether it is its operator, or the schedule, that has it in this generation, not users alone."""
        if self.booked is not None and self.booked.deployed_for:
            return generation in self.booked.deployed_for
        return not self.generations or generation in self.generations

    def dedicated_in(self, generation: str) -> int:
        """How many of its replicas in this generation are to be dedicated."""
        return self.wanted.replicas if self.dedicated and self.keeps(generation) else 0

    def least_in(self, generation: str) -> int:
        """How many replicas its line in this generation begins with."""
        return self.wanted.replicas if self.keeps(generation) else 1

    def scale(self, generation: str, replicas: int) -> None:
        """Its operator wants so many in this generation; none there says nothing of the others."""
        others = self.generations - {generation}
        if replicas:
            self.generations = others | {generation}
        elif others:
            self.generations = others
            return
        self.config = replace(self.config, replicas=replicas)

    @property
    def forgettable(self) -> bool:
        """Whether nothing is lost with it."""
        return self.on_demand and self.booked is None and not self.deploying

    def named(self, key: ModelKey) -> bool:
        """Whether a client that says `key` means it."""
        if key == self.key:
            return True
        # Asked of every model for every request: most are told apart before a sentence is made.
        if not self.called(key.repo_id):
            return False
        return refusal(self.config, replace(key, repo_id=self.config.repo_id)) is None

    def called(self, repo_id: str) -> bool:
        """Whether that is its name: the first, the one that a hub has for it, or another."""
        name = repo_id.lower()
        names = (self.config.repo_id.lower(), self.key.repo_id.lower())
        return name in names or name in self.aliases


class Models:
    """The models of one server."""

    def __init__(self, configs: Iterable[DeploymentConfig] = ()) -> None:
        self._models: list[Model] = []
        for config in configs:
            self.put(config)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def add(self, model: Model) -> None:
        """A model that is not among these yet."""
        self._models.append(model)

    def put(self, config: DeploymentConfig) -> Model:
        """What an operator wants served, in the place of what the same model was before."""
        model = self.find(config.key)
        if model is None:
            model = Model(config.key, config)
            self.add(model)
        else:
            model.config, model.on_demand = config, False
        return model

    def find(self, key: ModelKey) -> Model | None:
        """The model that `key` means, if it is known."""
        named = [model for model in self._models if model.named(key)]
        # What a user has asked for stands behind nobody's dedicated model.
        return min(named, key=lambda model: (model.key != key, not model.dedicated), default=None)

    def as_known(self, config: DeploymentConfig) -> DeploymentConfig:
        """`config` with the names by which its model is known here, where a hub has it under several."""
        model = self.find(config.key)
        if model is None or not all(
            model.called(name) for name in (config.checkpoint, model.config.checkpoint)
        ):
            return config
        return replace(config, repo_id=model.config.repo_id, checkpoint=model.config.checkpoint)

    def unite(self, model: Model) -> None:
        """Have a model be another of these, if by the name that was learnt it is. It has no replicas."""
        key = replace(model.key, repo_id=model.config.repo_id)
        others = [other for other in self._models if other is not model and other.named(key)]
        if model not in self._models or not others:
            return
        self._models.remove(model)
        model.same_as = min(others, key=lambda other: (other.key != key, not other.dedicated))
        model.same_as.aliases |= {model.key.repo_id.lower(), *model.aliases}
        model.on_demand, model.booked = True, None  # nothing is lost with it

    def of(self, key: ModelKey) -> Model:
        """The model whose `Model.key` it is.

        Raises:
            KeyError: if there is none.
        """
        for model in self._models:
            if model.key == key:
                return model
        raise KeyError(str(key))

    def called(self, name: str) -> list[Model]:
        """The models that an operator means by a repo id or a whole key."""
        if "{" in name:
            key = ModelKey.parse(name)
            return [model for model in self._models if model.named(key)]
        return [model for model in self._models if model.called(name)]

    def forget(self, model: Model) -> None:
        """Keep a name no longer that only a user has asked for, and that is not deployed."""
        if model.forgettable and model in self._models:
            self._models.remove(model)

    def admit(self, key: ModelKey, *, hotswapping: bool, keep: bool = True) -> Model:
        """The model that a client means: one that is dedicated, or any for who may have it loaded.

        `keep`: whether it is known from now on; until a request is accepted it is only looked at.

        Raises:
            NotServedError: with a sentence for the client.
        """
        model = self.find(key)
        if model is not None and (model.dedicated or hotswapping):
            return model
        if not hotswapping:
            raise NotServedError(self.not_dedicated(key))
        if not _REPO_ID.fullmatch(key.repo_id) or Path(key.repo_id).exists():
            raise NotServedError(
                f"{key.repo_id[:200]!r} names no repository. Make the model with the id that it has on "
                "the Hugging Face Hub, like openai-community/gpt2."
            )
        config = DeploymentConfig(key.repo_id, key.repo_id, key.revision, key.task)
        if sum(model.on_demand for model in self._models) >= _MOST_ON_DEMAND:
            raise NotServedError(
                f"{_MOST_ON_DEMAND} models are loaded on demand, or wait to be. Try again in a minute."
            )
        model = Model(key, config, on_demand=True)
        if keep:
            self._models.append(model)
        return model

    def not_dedicated(self, key: ModelKey) -> str:
        """Why who may not have models loaded on demand has not this one, and which there are for them."""
        served = [model.wanted for model in self._models if model.dedicated]
        near = [config for config in served if config.repo_id.lower() == key.repo_id.lower()]
        if len(served) == 1 or near:
            return refusal((near or served)[0], key) or "This model is not served."
        if not served:
            return (
                f"{key.repo_id[:200]!r} is not served: no model is dedicated on this server now, and you "
                "may not have models loaded on demand."
            )
        names = sorted({repr(config.repo_id) for config in served})
        if len(names) > _MOST_NAMED:
            names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} others (see /status)"]
        return (
            f"{key.repo_id[:200]!r} is not dedicated on this server, and you may not have models loaded "
            f"on demand. These are: {', '.join(names)}."
        )

    def book(self, configs: Iterable[DeploymentConfig]) -> tuple[list[Model], list[Model]]:
        """Have these dedicated by the schedule and no others: those that are now, and no longer."""
        wanted: dict[int, DeploymentConfig] = {}
        for config in configs:
            model = self.find(config.key)
            if model is None:
                model = Model(config.key, replace(config, dedicated=False), on_demand=True)
                self._models.append(model)
            wanted[id(model)] = config
        ended = [m for m in self._models if m.booked is not None and id(m) not in wanted]
        begun = [m for m in self._models if id(m) in wanted and m.booked != wanted[id(m)]]
        for model in self._models:
            model.booked = wanted.get(id(model))
        return begun, ended

    @staticmethod
    def learn(model: Model, repo_id: str | None, task: str | None) -> None:
        """What a model's files tell: its name as a hub spells it, and its task."""
        model.config = replace(
            model.config,
            repo_id=repo_id or model.config.repo_id,
            task=model.config.task or task,
        )
