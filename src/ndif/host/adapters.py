"""Adapters that untrusted requests name: a separate process fetches them, since runners have no network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndif.host.environment import environment, without_credentials
from ndif.host.runtimes import Runtime
from ndif.tasks import within

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PATIENCE_S = 60.0
_CURRENT_S = 300.0
"""Seconds for which a fetched adapter counts as current: asking the hub takes two seconds."""
_SHOWN = 100


class AdapterError(Exception):
    """An adapter cannot be used; the message says why."""


class Adapters:
    """A cache of public adapters that deletes the least recently used."""

    def __init__(self, runtime: Runtime, cache: Path, max_bytes: int, max_cache_bytes: int) -> None:
        """Create a cache.

        Args:
            runtime: Runtime whose interpreter fetches adapters.
            cache: Folder of the adapters.
            max_bytes: Largest size of one adapter.
            max_cache_bytes: Largest size of all together; the newest is kept whatever its size.
        """
        self._runtime = runtime
        self._cache = cache
        self._max_bytes = max_bytes
        self._max_cache_bytes = max_cache_bytes
        self._fetched: dict[str, float] = {}

    async def fetch(self, env: Mapping[str, Any]) -> None:
        """Fetch the adapter that a request's `env` names to where its runner can read it.

        Raises:
            AdapterError: if the adapter cannot be used.
        """
        name = env.get("peft")
        if name is None:
            return
        if not isinstance(name, str) or not _REPOSITORY.fullmatch(name):
            raise AdapterError(
                f"The adapter {str(name)[:_SHOWN]!r} is not the name of a repository (ORG/NAME). This "
                "server takes adapters from the Hub alone, not from folders."
            )
        folder = self._cache / f"models--{name.replace('/', '--')}"
        if time.monotonic() - self._fetched.get(name, -_CURRENT_S) >= _CURRENT_S or not _exists(
            folder
        ):
            await self._fetch(name)
            self._fetched[name] = time.monotonic()
        await asyncio.to_thread(self._make_room, folder)

    async def _fetch(self, name: str) -> None:
        fetching = await asyncio.create_subprocess_exec(
            str(self._runtime.interpreter),
            "-m",
            "ndif.runtime.weights.adapter",
            name,
            str(self._cache),
            str(self._max_bytes),
            env=without_credentials(environment(self._runtime)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            _, said = await within(fetching.communicate(), _PATIENCE_S)
        except asyncio.TimeoutError as error:
            raise AdapterError(
                f"The adapter {name!r} did not arrive within {_PATIENCE_S:g} seconds."
            ) from error
        finally:
            if fetching.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    fetching.kill()
        if fetching.returncode != 0:
            why = said.decode(errors="replace").strip().splitlines() or ["fetching it failed"]
            raise AdapterError(f"The adapter {name!r} cannot be used here: {why[-1]}.")

    def _make_room(self, newest: Path) -> None:
        """Mark `newest` as used now, and delete the least recently used until all fit."""
        with contextlib.suppress(OSError):  # another replica deletes at the same time
            # The clock's time: the system's own stamp has a resolution of some ms.
            os.utime(newest, ns=(time.time_ns(), time.time_ns()))
            sizes = {folder: _bytes(folder) for folder in self._cache.glob("models--*")}
            used = sorted(sizes, key=lambda folder: folder.stat().st_mtime_ns)
            total = sum(sizes.values())
            for folder in used:
                if total <= self._max_cache_bytes or folder == newest:
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                total -= sizes[folder]


def _exists(folder: Path) -> bool:
    return folder.is_dir()


def _bytes(folder: Path) -> int:
    """Return the size of a folder's files, without symbolic links."""
    return sum(
        file.lstat().st_size
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    )
