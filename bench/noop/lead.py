"""`python -m ndif.server.leader` with replicas whose models do nothing."""

from __future__ import annotations

from bench.noop import NoopRuntimes
from bench.noop.replica import NoopReplica
from ndif.cluster.remote_actor import RemoteActor
from ndif.host.runtimes import Runtimes
from ndif.server.leader import LeaderCandidate, main


class NoopLeader(LeaderCandidate):
    """A leader that starts no-op replicas."""

    def runtimes(self) -> Runtimes:
        """Return the no-op runtimes."""
        return NoopRuntimes(self.settings.session_root)

    def replica(self) -> type[RemoteActor]:
        """Return the class of no-op replicas."""
        return NoopReplica


if __name__ == "__main__":
    main(NoopLeader)
