"""The states of replicas, processors and probes, as answers tell them."""

from __future__ import annotations

from enum import Enum


class DeploymentLevel(str, Enum):
    """Place of a replica's weights."""

    HOT = "HOT"
    """On the device that runs them: the replica serves."""
    WARM = "WARM"
    """In the node's memory, in a process that waits: the replica returns without reading a file."""
    COLD = "COLD"
    """On disk only: no replica exists."""


class ReplicaState(str, Enum):
    """State of a replica, or of all that a model has."""

    NOT_STARTED = "NOT DEPLOYED"
    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"

    @property
    def for_clients(self) -> str:
        """Return the state in the four words that clients of 0.6 and 0.7 know; others are errors there."""
        return "DOWN" if self is ReplicaState.UNHEALTHY else self.value


class ProcessorStatus(str, Enum):
    """State of a processor, or of one of its replicas; one that is further comes later."""

    UNINITIALIZED = "NOT DEPLOYED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    READY = "READY"
    BUSY = "BUSY"
    CANCELLED = "CANCELLED"


class ProbeKind(str, Enum):
    """The kinds of outcome of a probe, as a metric's label has them."""

    OK = "ok"
    WRONG = "wrong"
    """A value came that cannot be the model's, or is another than before."""
    ERROR = "error"
    """The server refused the trace, or ended it with an error."""
    TIMEOUT = "timeout"
    DOWN = "down"
    """No replica serves, and none is loading, or one has been for too long."""
    LOADING = "loading"
    """The model is being loaded, and serves once it is there."""
    UNSUPPORTED = "unsupported"
    """The model cannot be probed, which says nothing of the server."""
