"""Facts about a server for clients: its version and its nnsight generations."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from ndif import __version__
from ndif.dashboard.access import Mode
from ndif.host.runtimes import SUPPORTED, Runtimes
from ndif.schema.public_state import Facts, InstalledGeneration

_FRESH_S = 30.0


@dataclass
class ServerFacts:
    """Describes the server to pages; the list of installed generations is at most 30 s old."""

    runtimes: Runtimes
    mode: Mode
    needs_key: bool
    """True if clients need an API key."""
    _installed: list[InstalledGeneration] = field(default_factory=list)
    _installed_at: float = field(default=float("-inf"))

    async def describe(self) -> Facts:
        """Return the facts."""
        if time.monotonic() - self._installed_at > _FRESH_S:
            self._installed = await asyncio.to_thread(self._generations)
            self._installed_at = time.monotonic()
        return Facts(
            version=__version__,
            access=self.mode,
            needs_key=self.needs_key,
            generations=self._installed,
        )

    def _generations(self) -> list[InstalledGeneration]:
        return [
            InstalledGeneration(
                generation=name, version=runtime.version, requirement=SUPPORTED[name]
            )
            for name, runtime in self.runtimes.installed().items()
            if name in SUPPORTED
        ]
