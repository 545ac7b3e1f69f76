"""Adapters that strangers name: a process of its own fetches them, since runners reach no network."""

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
"""How long what was fetched is not looked for again: to ask the hub takes two seconds."""
_SHOWN = 100


class AdapterError(Exception):
    """An adapter is not to be had; the message says why."""


class Adapters:
    """A cache of public adapters, of which those go that nobody named for longest."""

    def __init__(self, runtime: Runtime, cache: Path, max_bytes: int, max_cache_bytes: int) -> None:
        """`max_bytes`: of one; `max_cache_bytes`: of all, though the newest is always kept."""
        self._runtime = runtime
        self._cache = cache
        self._max_bytes = max_bytes
        self._max_cache_bytes = max_cache_bytes
        self._fetched: dict[str, float] = {}

    async def fetch(self, env: Mapping[str, Any]) -> None:
        """Have what a request's `env` names where its runner can read it.

        Raises:
            AdapterError: if it cannot be had.
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
            "ndif.runtime.adapter",
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
            why = said.decode(errors="replace").strip().splitlines() or ["its fetching failed"]
            raise AdapterError(f"The adapter {name!r} cannot be used here: {why[-1]}.")

    def _make_room(self, newest: Path) -> None:
        """Note that `newest` was named just now, and delete others until all fit."""
        with contextlib.suppress(OSError):  # another replica's, which makes room itself
            # By the clock: the system's own stamp tells nothing apart within its tick of some ms.
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
    """What lies in it; links into it count nothing."""
    return sum(
        file.lstat().st_size
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    )
