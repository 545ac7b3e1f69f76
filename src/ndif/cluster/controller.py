"""Controller: which replicas exist (specification, section 5.1). Embedded form: one model, this machine."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ndif.host.actor import ModelActor
from ndif.host.process import ModelProcessError
from ndif.schema.deployment import DeploymentConfig

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
MakeActor = Callable[[DeploymentConfig, str], ModelActor]


class State(str, Enum):
    """A deployment's state, by the names that clients print."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"


class DeploymentError(Exception):
    """The model cannot be served; the message says why."""


@dataclass
class Deployment:
    """One replica of the model in one runtime."""

    generation: str
    state: State = State.NOT_STARTED
    actor: ModelActor | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.actor is not None and not self.actor.process.ended.is_set()


class Controller:
    """Keeps the replicas of its model, as many for each nnsight generation that has a client."""

    def __init__(self, config: DeploymentConfig, make_actor: MakeActor) -> None:
        self.config = config
        self._make_actor = make_actor
        self._deployments: dict[str, dict[str, Deployment]] = {}

    def replica_ids(self, generation: str) -> list[str]:
        """The replicas that `generation` is to have, whether they run or not."""
        known = self._deployments.setdefault(generation, {})
        while len(known) < self.config.replicas:
            known[uuid.uuid4().hex] = Deployment(generation)
        return list(known)

    async def deploy(
        self,
        generation: str,
        replica_id: str,
        progress: Progress = lambda done, total: None,
    ) -> ModelActor:
        """A replica, started if it does not run.

        Raises:
            DeploymentError: if it cannot be started.
        """
        deployment = self._deployments[generation][replica_id]
        async with deployment.starting:
            if deployment.actor is not None and deployment.alive:
                return deployment.actor
            deployment.state = State.DEPLOYING
            actor = self._make_actor(self.config, generation)
            try:
                await actor.start(progress)
            except ModelProcessError as error:
                deployment.state = State.UNHEALTHY
                raise DeploymentError(
                    f"{self.config.repo_id!r} could not be loaded for nnsight {generation}: {error}"
                ) from error
            deployment.actor, deployment.state = actor, State.RUNNING
            self._learn(actor.process.model)
            return actor

    def _learn(self, model: Mapping[str, Any]) -> None:
        """What only a loaded model tells: its name as a hub spells it, and its task."""
        self.config = replace(
            self.config,
            repo_id=model.get("repo_id") or self.config.repo_id,
            task=self.config.task or model.get("task"),
        )

    def ready(self, generation: str, replica_id: str) -> bool:
        """Whether `deploy` would return at once."""
        return self._deployments[generation][replica_id].alive

    @property
    def connected(self) -> bool:
        """Whether some replica can run a request."""
        return any(deployment.alive for deployment in self._all())

    def _all(self) -> list[Deployment]:
        return [d for replicas in self._deployments.values() for d in replicas.values()]

    def status(self) -> dict[str, Any]:
        """What `GET /status` answers, in the form that every client generation reads."""
        state = self._furthest(self._all())
        key = self.config.key
        entry = {
            "model_key": str(key),
            "repo_id": key.repo_id,
            "revision": key.revision,
            "task": key.task,
            "trust_remote_code": False,
            "deployment_level": "HOT",
            "application_state": state.value,
            "replicas": {
                generation: sum(d.alive for d in replicas.values())
                for generation, replicas in self._deployments.items()
            },
            "dedicated": True,
            "runtimes": {
                generation: self._furthest(replicas.values()).value
                for generation, replicas in self._deployments.items()
            },
        }
        return {"deployments": {str(key): entry}}

    def _furthest(self, deployments: Iterable[Deployment]) -> State:
        """The state of what serves a client best."""
        states = [self._state(deployment) for deployment in deployments]
        order = (State.RUNNING, State.DEPLOYING, State.UNHEALTHY)
        return next((state for state in order if state in states), State.NOT_STARTED)

    def _state(self, deployment: Deployment) -> State:
        lost = deployment.state is State.RUNNING and not deployment.alive
        return State.UNHEALTHY if lost else deployment.state

    async def stop(self) -> None:
        """End every replica."""
        actors = [d.actor for d in self._all() if d.actor is not None]
        await asyncio.gather(*(actor.stop() for actor in actors))
