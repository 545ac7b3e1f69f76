"""The files from which clients build models, and their places in the object store for the gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ndif.cluster.models import Model, Models
from ndif.cluster.replica import Replica
from ndif.host.snapshot import find_files, publish
from ndif.schema.deployment import read_task
from ndif.stores.objects import ObjectStore, ObjectStoreError

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_LOOK_AGAIN_S = 10.0
"""Seconds until a model is looked for again whose files are not on this machine, or cannot be stored."""

StoredFiles = dict[str, dict[str, Any]]
"""For each repository its archive's key as `files`, `revision` and `task`; JSON-serialisable."""


class ModelFiles(NamedTuple):
    """The folder of a model on this machine."""

    repo_id: str
    folder: Path
    revision: str | None
    task: str | None


def find(model: Model) -> ModelFiles | None:
    """Return the files of an accepted model if they are on this machine; they need not be loaded."""
    config = model.deployment
    if not model.provides_files:
        return None
    folder = find_files(config.checkpoint, config.revision)
    if folder is None:
        return None
    task = config.task or read_task(folder / "config.json")
    return ModelFiles(config.repo_id, folder, config.revision, task)


def files_of(replicas: Iterable[Replica]) -> StoredFiles:
    """Return the files that replicas have stored (`ModelActor.model`)."""
    return {
        each.model.config.repo_id: {
            "files": each.actor.model["files"],
            "revision": each.model.config.revision,
            "task": each.model.config.task,
        }
        for each in replicas
        if each.is_up and each.model.provides_files and "files" in each.actor.model
    }


@dataclass(eq=False)
class ModelFilesStorage:
    """Stores the files of each accepted model that are on this machine, before any replica has loaded it.

    A replica stores its own once it is up: those of a repository may be on its node alone.
    """

    models: Models
    objects: ObjectStore
    _known: dict[tuple[str, str | None], tuple[ModelFiles, str]] = field(
        default_factory=dict, init=False
    )
    """Files and the key of their archive by checkpoint and revision."""
    _look_again: dict[tuple[str, str | None], float] = field(default_factory=dict, init=False)

    @property
    def stored(self) -> StoredFiles:
        """Return the files of the models that are accepted now; of two of one name, the first's."""
        stored: StoredFiles = {}
        for model in self.models:
            config = model.deployment
            known = self._known.get((config.checkpoint, config.revision))
            if known is not None and model.provides_files:
                found, key = known
                entry = {"files": key, "revision": config.revision, "task": found.task}
                stored.setdefault(config.repo_id, entry)
        return stored

    async def run(self) -> None:
        """Store files until cancelled."""
        while True:
            for model in list(self.models):
                try:
                    await self._store(model)
                except (ObjectStoreError, OSError) as error:
                    logger.warning("the files of %s are not stored: %s", model.key.repo_id, error)
                except Exception:
                    logger.exception("the files of %s are not stored", model.key.repo_id)
            await asyncio.sleep(_INTERVAL_S)

    async def _store(self, model: Model) -> None:
        source = model.deployment.checkpoint, model.deployment.revision
        now = asyncio.get_running_loop().time()
        if source in self._known or self._look_again.get(source, now) > now:
            return
        self._look_again[source] = now + _LOOK_AGAIN_S
        if (found := await asyncio.to_thread(find, model)) is not None:
            key = await publish(found.folder, found.revision, self.objects)
            self._known[source] = found, key
