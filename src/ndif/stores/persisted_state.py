"""A small state that outlives its process: the alerts of a server, and the log of its events."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ndif.runtime.typed_json import from_json, to_json
from ndif.stores.broker import BrokerError
from ndif.stores.broker.signing import SignatureError
from ndif.stores.disk import open_private

if TYPE_CHECKING:
    # A server of one process does not import the client of Redis.
    from ndif.stores.leader import SharedCache

logger = logging.getLogger(__name__)

ALERTS, EVENTS = "alerts", "events"
"""Names of the states."""
_DAY_S = 24 * 3600.0
_LIFE_S = {ALERTS: 7 * _DAY_S, EVENTS: 90 * _DAY_S}
"""Seconds for which Redis keeps each state for the next leader; a week-old incident is of no use."""

T = TypeVar("T")


class SavedState(Protocol[T]):
    """A store for a state that the next process loads."""

    async def load(self) -> T | None:
        """Return the last saved state, or None. A `BrokerError` means: try again later."""

    async def save(self, state: T) -> None:
        """Save a state, or raise a BrokerError or OSError."""


class StateFile(Generic[T]):
    """A file beside the results of a server of one process."""

    def __init__(self, folder: Path, name: str, kind: type[T]) -> None:
        self._name = name
        self._kind = kind
        self._file = folder / f"{name}.json"

    async def load(self) -> T | None:
        """See `SavedState.load`. A file that cannot be read counts as none."""
        try:
            return from_json(self._kind, await asyncio.to_thread(self._file.read_bytes))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the saved %s are lost: %s", self._name, error)
            return None

    async def save(self, state: T) -> None:
        await asyncio.to_thread(self._write, to_json(state))

    def _write(self, content: bytes) -> None:
        part = self._file.with_name(f"{self._file.name}.part")
        with open_private(part) as file:
            file.write(content.decode())
        part.replace(self._file)


class SharedState(Generic[T]):
    """A signed value in Redis, which a leader on any machine can load."""

    def __init__(self, cache: SharedCache, name: str, kind: type[T]) -> None:
        self._cache = cache
        self._name = name
        self._kind = kind

    async def load(self) -> T | None:
        """See `SavedState.load`. A value of another secret or another version counts as none."""
        try:
            return await self._cache.read(self._name, self._kind)
        except BrokerError as error:
            if not isinstance(error.__cause__, SignatureError):
                raise
        except ValueError as error:
            logger.warning("the saved %s are lost: %s", self._name, error)
        return None

    async def save(self, state: T) -> None:
        await self._cache.write(self._name, state, _LIFE_S[self._name])
