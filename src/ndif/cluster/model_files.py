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


class _Archive(NamedTuple):
    """The key of an archive in the object store, and the task that its model's config names."""

    key: str
    task: str | None = None


_Source = tuple[str, str | None]
"""Checkpoint and revision."""


def _source(model: Model) -> _Source:
    return model.deployment.checkpoint, model.deployment.revision


@dataclass(eq=False)
class ModelFilesStorage:
    """Stores the files of each accepted model that are on this machine, before any replica has loaded it.

    A replica stores its own once it is up, and clients then have those: the files of a repository
    may be on its node alone, or newer there.
    """

    models: Models
    objects: ObjectStore
    _known: dict[_Source, _Archive] = field(default_factory=dict, init=False)
    _look_again: dict[_Source, float] = field(default_factory=dict, init=False)

    @property
    def stored(self) -> StoredFiles:
        """Return the files of the models that are accepted now; of two of one name, the first's."""
        stored: StoredFiles = {}
        for model in self.models:
            config = model.deployment
            known = self._known.get(_source(model))
            if known is not None and model.provides_files:
                task = config.task or known.task
                entry = {"files": known.key, "revision": config.revision, "task": task}
                stored.setdefault(config.repo_id, entry)
        return stored

    def note(self, replicas: Iterable[Replica]) -> None:
        """Note the files that replicas have stored (`ModelActor.model`)."""
        for each in replicas:
            if each.is_up and "files" in each.actor.model:
                self._known[_source(each.model)] = _Archive(each.actor.model["files"])

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
        source = _source(model)
        now = asyncio.get_running_loop().time()
        if source in self._known or self._look_again.get(source, now) > now:
            return
        self._look_again[source] = now + _LOOK_AGAIN_S
        if (found := await asyncio.to_thread(find, model)) is not None:
            key = await publish(found.folder, found.revision, self.objects)
            self._known.setdefault(source, _Archive(key, found.task))
