"""Files from the Hub, fetched by processes that end before untrusted code runs: models, and adapters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndif.config.units import format_duration
from ndif.host.environment import environment, without_credentials
from ndif.host.runtimes import Runtime
from ndif.runtime.sizing import RepositoryFacts
from ndif.runtime.spec import ModelSpec
from ndif.runtime.typed_json import from_json, to_json
from ndif.runtime.weights.cache import CacheRules, folder_of, in_use, record_download, record_use
from ndif.schema.deployment import read_task
from ndif.schema.repositories import Repositories
from ndif.tasks import reap, within

logger = logging.getLogger(__name__)

_NO_RULES = CacheRules()
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PATIENCE_S = 60.0
_END_S = 2.0
"""Seconds that a download has to delete its unfinished files before it is killed."""
_CURRENT_S = 300.0
"""Seconds for which a fetched adapter counts as current: asking the hub takes two seconds."""
_MAX_QUOTED = 100
_WITHOUT_TASKS = ("0.7", "0.6")
"""Generations of nnsight that have no tasks."""


@contextlib.asynccontextmanager
async def _fetch_process(
    runtime: Runtime, *arguments: str, variables: Mapping[str, str], stderr: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a module of the runtime with these arguments in a process that ends with the context.

    The module ends when its standard input closes, so it also ends if this process is killed.
    """
    theirs, ours = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(runtime.interpreter), "-m", *arguments),
            env=variables,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        yield process
    finally:
        os.close(ours)
        if process.returncode is None:
            asyncio.get_running_loop().call_later(_END_S, _kill, process)
            await reap(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


class DownloadError(Exception):
    """The files cannot be downloaded; the message says why."""


async def download(
    spec: ModelSpec,
    runtime: Runtime,
    progress: Callable[[int, int], None],
    rules: CacheRules = _NO_RULES,
) -> RepositoryFacts:
    """Download the files of a repository to the cache, or raise a `DownloadError`."""
    with contextlib.ExitStack() as held:
        # This waits while another process deletes the repository.
        await asyncio.to_thread(held.enter_context, in_use(spec.checkpoint))
        held.callback(record_download, spec.checkpoint, None)
        return await _download(spec, runtime, progress, rules)


async def _download(
    spec: ModelSpec, runtime: Runtime, progress: Callable[[int, int], None], rules: CacheRules
) -> RepositoryFacts:
    facts: RepositoryFacts | None = None
    why = "the download ended without a reason"
    module, arguments = (
        "ndif.runtime.weights.fetch",
        (to_json(spec).decode(), to_json(rules).decode()),
    )
    variables = environment(runtime)
    async with _fetch_process(
        runtime, module, *arguments, variables=variables, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        async for line in process.stdout:
            with contextlib.suppress(ValueError):  # a line that a library printed
                match json.loads(line):
                    case {"done": int(done), "total": int(total)}:
                        progress(done, total)
                    case {"failed": str(why)}:
                        pass
                    case {"deleted": [*names]}:
                        listing = ", ".join(map(str, names))
                        logger.info("deleted to make room for %s: %s", spec.checkpoint, listing)
                    case {"folder": _}:
                        facts = from_json(RepositoryFacts, line)
        await process.wait()
    if facts is None:
        raise DownloadError(why)
    return facts


def task_to_load(spec: ModelSpec, facts: RepositoryFacts) -> str | None:
    """Return the task under which a model is loaded: the one that `spec` names, or its architecture's."""
    if spec.task is not None or spec.generation in _WITHOUT_TASKS:
        return spec.task
    return read_task(Path(facts.folder, "config.json"), facts.card)


class AdapterError(Exception):
    """An adapter cannot be used; the message says why."""


@dataclass(eq=False)
class Adapters:
    """The adapters of requests whose runners cannot reach the hub.

    `cache` holds the public adapters of untrusted requests; the least recently used are deleted, but never
    the newest. Adapters of trusted requests are in the Hub's cache.
    """

    runtime: Runtime
    cache: Path
    max_bytes: int
    """Largest size of one adapter."""
    max_cache_bytes: int
    repositories: Repositories = field(default_factory=Repositories)
    """Repositories whose adapters may be downloaded."""
    _fetched: dict[tuple[str, bool], float] = field(default_factory=dict)
    """Time of the last fetch, by an adapter's name and True for trusted requests."""

    async def fetch(self, env: Mapping[str, Any], *, trusted: bool = False) -> None:
        """Fetch the adapter that a request's `env` names to a place that its runner can read.

        A trusted request may use every adapter that the operator may use: a folder, a private repository,
        any size. Raise an `AdapterError` if the adapter cannot be used.
        """
        name = env.get("peft")
        if name is None:
            return
        if trusted:
            await self._fetch_for_trusted(str(name))
            return
        if not isinstance(name, str) or not _REPOSITORY.fullmatch(name):
            raise AdapterError(
                f"The adapter {str(name)[:_MAX_QUOTED]!r} is not the name of a repository (ORG/NAME). This "
                "server takes adapters from the Hub alone, not from folders."
            )
        self._require_permitted(name, name)
        folder = self.cache / f"models--{name.replace('/', '--')}"
        if not self._is_current(name, trusted=False) or not folder.is_dir():
            variables = without_credentials(environment(self.runtime))
            canonical_name = await self._fetch(
                name, variables, str(self.cache), str(self.max_bytes)
            )
            self._require_permitted(name, canonical_name)
            self._fetched[name, False] = time.monotonic()
        await asyncio.to_thread(self._evict, folder)

    async def _fetch_for_trusted(self, name: str) -> None:
        is_folder = await asyncio.to_thread(Path(name).is_dir)
        is_current = self._is_current(name, trusted=True)
        if is_folder or (is_current and folder_of(name).is_dir()):
            return
        await self._fetch(name, environment(self.runtime))
        record_use(name)
        self._fetched[name, True] = time.monotonic()

    def _is_current(self, name: str, *, trusted: bool) -> bool:
        return time.monotonic() - self._fetched.get((name, trusted), -_CURRENT_S) < _CURRENT_S

    async def _fetch(self, name: str, variables: Mapping[str, str], *arguments: str) -> str:
        """Download an adapter in a separate process; return that process's output."""
        module = "ndif.runtime.weights.adapter"
        async with _fetch_process(
            self.runtime, module, name, *arguments, variables=variables, stderr=subprocess.PIPE
        ) as process:
            try:
                printed, errors = await within(process.communicate(), _PATIENCE_S)
            except asyncio.TimeoutError as error:
                raise AdapterError(
                    f"The adapter {name!r} did not arrive within {format_duration(_PATIENCE_S)}."
                ) from error
        if process.returncode != 0:
            why = errors.decode(errors="replace").strip().splitlines() or ["fetching it failed"]
            raise AdapterError(f"The adapter {name!r} cannot be used here: {why[-1]}.")
        return printed.decode(errors="replace").strip()

    def _require_permitted(self, name: str, canonical_name: str) -> None:
        """Raise an `AdapterError` if the operator does not allow the repository `canonical_name`."""
        if not self.repositories.permit(canonical_name):
            raise AdapterError(
                f"The adapter {name!r} is not used on this server: its operator does not allow that "
                "repository. Ask them for it."
            )

    def _evict(self, newest: Path) -> None:
        """Mark `newest` as used now, and delete the least recently used adapters until the rest fits."""
        with contextlib.suppress(OSError):  # another replica deletes folders at the same time
            # The clock's time: the system's own stamp has a resolution of some ms.
            os.utime(newest, ns=(time.time_ns(), time.time_ns()))
            sizes = {folder: _folder_bytes(folder) for folder in self.cache.glob("models--*")}
            used = sorted(sizes, key=lambda folder: folder.stat().st_mtime_ns)
            total = sum(sizes.values())
            for folder in used:
                if total <= self.max_cache_bytes or folder == newest:
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                total -= sizes[folder]


def _folder_bytes(folder: Path) -> int:
    """Return the size of a folder's files, without symbolic links."""
    return sum(
        file.lstat().st_size
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    )
