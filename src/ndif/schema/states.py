"""The states of replicas and processors, and the outcomes of probes, as in answers."""

from __future__ import annotations

from enum import Enum


class DeploymentLevel(str, Enum):
    """Place of a replica's weights."""

    HOT = "HOT"
    """On the device that runs the model: the replica serves."""
    WARM = "WARM"
    """In the node's memory, in a waiting process: the replica returns without reading a file."""
    COLD = "COLD"
    """On disk only: no replica exists."""


class ReplicaState(str, Enum):
    """State of one replica, or of all replicas of a model."""

    NOT_STARTED = "NOT DEPLOYED"
    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"

    @property
    def for_clients(self) -> str:
        """Return the state as one of the four words that clients of 0.6 and 0.7 accept."""
        return "DOWN" if self is ReplicaState.UNHEALTHY else self.value


class ProcessorStatus(str, Enum):
    """State of a processor or of one of its replicas, in the order of progress."""

    UNINITIALIZED = "NOT DEPLOYED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    READY = "READY"
    BUSY = "BUSY"
    CANCELLED = "CANCELLED"


class ProbeKind(str, Enum):
    """Outcomes of a probe; the values are labels of a metric."""

    OK = "ok"
    WRONG = "wrong"
    """The value cannot be the model's, or differs from an earlier value."""
    ERROR = "error"
    """The server refused the trace, or ended it with an error."""
    TIMEOUT = "timeout"
    DOWN = "down"
    """No replica serves, and none is loading, or a replica has been loading for too long."""
    LOADING = "loading"
    """The model is loading, and serves afterwards."""
    UNSUPPORTED = "unsupported"
    """The model cannot be probed. This says nothing about the server."""
