"""The files from which clients build models, and their copies in the object store for gateways."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ndif.cluster.models import Model, Models
from ndif.cluster.replica import Replica
from ndif.host.snapshot import Snapshot, fetch, find_files, publish
from ndif.schema.deployment import read_task
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.tasks import in_daemon_thread

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_LOOK_AGAIN_S = 10.0
"""Seconds until the next attempt for a model whose files were not found or not stored."""

_ASK_AGAIN_S = 60.0
"""Seconds until files that the Hub refused are requested again."""

_Source = tuple[str, str | None]
"""Checkpoint and revision."""


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The files of one model in the object store."""

    files: str
    """The archive's key."""
    revision: str | None
    task: str | None


class ModelFiles(NamedTuple):
    """The files of a model, from a folder of this machine or from the Hub."""

    repo_id: str
    source: Path | Snapshot
    revision: str | None
    task: str | None


@dataclass(eq=False)
class ModelFinder:
    """Finds the files of accepted models on this machine, or fetches the shared files from the Hub.

    The model need not be loaded, and its weights need not be on this machine.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _fetched: dict[_Source, Snapshot] = field(default_factory=dict, init=False)
    _ask_again: dict[_Source, float] = field(default_factory=dict, init=False)
    _folders: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list, init=False)
    """Folders of fetched files; a folder is deleted with its object."""

    def find(self, model: Model) -> ModelFiles | None:
        """Return a model's files; None if they are unavailable. Callable from any thread; may block."""
        config = model.deployment
        if not model.provides_files:
            return None
        source: Path | Snapshot | None = find_files(config.checkpoint, config.revision)
        if source is None:
            source = self._fetch(_source(model))
        if source is None:
            return None
        named = source.files.get if isinstance(source, Snapshot) else source.joinpath
        path = named("config.json")
        task = config.task or (None if path is None else read_task(path))
        return ModelFiles(config.repo_id, source, config.revision, task)

    def _fetch(self, source: _Source) -> Snapshot | None:
        with self._lock:
            snapshot, now = self._fetched.get(source), time.monotonic()
            if snapshot is not None or self._ask_again.get(source, now) > now:
                return snapshot
            try:
                # The process may end while the download thread still writes to the folder.
                folder = tempfile.TemporaryDirectory(prefix="ndif-hub-", ignore_cleanup_errors=True)
                snapshot = fetch(*source, Path(folder.name))
            except OSError as error:
                self._ask_again[source] = now + _ASK_AGAIN_S
                logger.info("the shared files of %s were not fetched: %s", source[0], error)
                return None
            self._folders.append(folder)
            self._fetched[source] = snapshot
            return snapshot


class _Archive(NamedTuple):
    """An archive's key in the object store, and the task in the model's config."""

    key: str
    task: str | None = None


def _source(model: Model) -> _Source:
    return model.deployment.checkpoint, model.deployment.revision


@dataclass(eq=False)
class ModelFilesStorage:
    """Stores the files of each accepted model before any replica loads it.

    Once a replica is up, the files that it stored replace the first ones. The files of a repository may
    exist only on the replica's node, or be newer there.
    """

    models: Models
    objects: ObjectStore
    finder: ModelFinder = field(default_factory=ModelFinder)
    _archives: dict[_Source, _Archive] = field(default_factory=dict, init=False)
    _look_again: dict[_Source, float] = field(default_factory=dict, init=False)

    @property
    def stored(self) -> dict[str, StoredFiles]:
        """Return the files of accepted models by repository; of several models, the first one's files."""
        stored: dict[str, StoredFiles] = {}
        for model in self.models:
            config = model.deployment
            archive = self._archives.get(_source(model))
            if archive is not None and model.provides_files:
                task = config.task or archive.task
                entry = StoredFiles(archive.key, config.revision, task)
                stored.setdefault(config.repo_id, entry)
        return stored

    def record(self, replicas: Iterable[Replica]) -> None:
        """Record the files that replicas have stored (`ModelActor.model`)."""
        for replica in replicas:
            loaded = replica.actor.model
            if replica.is_up and loaded is not None and loaded.files is not None:
                self._archives[_source(replica.model)] = _Archive(loaded.files)

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
        if source in self._archives or self._look_again.get(source, now) > now:
            return
        self._look_again[source] = now + _LOOK_AGAIN_S
        # After a cancellation, the thread of a slow download continues until the process ends.
        files = await in_daemon_thread(partial(self.finder.find, model))
        if files is not None:
            key = await publish(files.source, files.revision, self.objects)
            self._archives.setdefault(source, _Archive(key, files.task))
