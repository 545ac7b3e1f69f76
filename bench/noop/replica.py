"""A replica on a Ray node whose model takes no time."""

from __future__ import annotations

from bench.noop import NoopRuntimes
from ndif.config.settings import Settings
from ndif.host.runtimes import Runtimes
from ndif.server.node_actor import NodeActor


class NoopReplica(NodeActor):
    """A real `NodeActor`, except that it starts no-op model processes."""

    def runtimes(self, settings: Settings) -> Runtimes:
        """See `NodeActor.runtimes`."""
        return NoopRuntimes(settings.session_root)
