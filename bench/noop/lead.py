"""`python -m ndif.server.lead`, but for the replicas that it has Ray start: their models take no time."""

from __future__ import annotations

from bench.noop import NoopRuntimes
from bench.noop.replica import NoopReplica
from ndif.host.replica import Replica
from ndif.host.runtimes import Runtimes
from ndif.server.lead import Leader, main


class NoopLeader(Leader):
    """See `Leader`."""

    def runtimes(self) -> Runtimes:
        """See `Leader.runtimes`."""
        return NoopRuntimes(self.settings.session_root)

    def replica(self) -> type[Replica]:
        """See `Leader.replica`."""
        return NoopReplica


if __name__ == "__main__":
    main(NoopLeader)
