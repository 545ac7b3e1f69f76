"""`python -m ndif.server.lead`, but for the replicas that it has Ray start: their models take no time."""

from __future__ import annotations

from bench.noop import NoopRuntimes
from bench.noop.replica import NoopReplica
from ndif.cluster.fleet import Fleet
from ndif.cluster.ray_cluster import RayCluster
from ndif.host.runtimes import Runtimes
from ndif.server.lead import Leader, main


class NoopLeader(Leader):
    """See `Leader`."""

    def runtimes(self) -> Runtimes:
        """See `Leader.runtimes`."""
        return NoopRuntimes(self.settings.session_root)

    def fleet(self) -> Fleet:
        """See `Leader.fleet`."""
        return RayCluster(self.settings.ray_address, NoopReplica)


if __name__ == "__main__":
    main(NoopLeader)
