"""A replica on a node of Ray's whose model takes no time."""

from __future__ import annotations

from bench.noop import NoopRuntimes
from ndif.config import Settings
from ndif.host.runtimes import Runtimes
from ndif.server.node_replica import NodeReplica


class NoopReplica(NodeReplica):
    """A real one, but for what it starts."""

    def runtimes(self, settings: Settings) -> Runtimes:
        """See `NodeReplica.runtimes`."""
        return NoopRuntimes(settings.session_root)
