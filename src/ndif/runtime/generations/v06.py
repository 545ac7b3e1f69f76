"""nnsight 0.6: as 0.7, but the depth of nested traces is counted."""

from __future__ import annotations

from typing import Any

from nnsight.intervention.tracing.globals import Globals

from ndif.runtime.generations.v07 import Nnsight07


class Nnsight06(Nnsight07):
    """The adapter of this generation."""

    name = "0.6"

    def export(self, saves: dict[str, Any]) -> dict[str, Any]:
        """See `Generation.export`."""
        return saves

    def _enter(self) -> None:
        Globals.enter()
        # One level deeper than a client: the outermost forgets what was saved when it ends.
        Globals.enter()
