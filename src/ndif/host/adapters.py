"""Adapters that strangers name: a process of its own fetches them, since runners reach no network."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndif.host.environment import environment, without_credentials
from ndif.host.runtimes import Runtime

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PATIENCE_S = 60.0
_SHOWN = 100


class AdapterError(Exception):
    """An adapter is not to be had; the message says why."""


class Adapters:
    """A cache of public adapters."""

    def __init__(self, runtime: Runtime, cache: Path, max_bytes: int) -> None:
        self._runtime = runtime
        self._cache = cache
        self._max_bytes = max_bytes

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
            _, said = await asyncio.wait_for(fetching.communicate(), _PATIENCE_S)
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
