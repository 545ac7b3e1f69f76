"""How near to its work a replica is, and how well a node would take one (specification, section 5.4)."""

from __future__ import annotations

from enum import Enum, IntEnum


class DeploymentLevel(str, Enum):
    """Where the weights of a replica are."""

    HOT = "HOT"
    """On the device that runs them: it serves."""
    WARM = "WARM"
    """In the node's memory, in a process that waits: it returns without reading a file."""
    COLD = "COLD"
    """On disk only: there is no replica."""


class CandidateLevel(IntEnum):
    """What a node would have to do for a replica. The lowest wins."""

    DEPLOYED = 0
    """Nothing: it is HOT there."""
    CACHED_AND_FREE = 1
    """It is WARM there, and there is room for it."""
    FREE = 2
    """There is room."""
    CACHED_AND_FULL = 3
    """It is WARM there, and others have to go."""
    FULL = 4
    """Others have to go."""
    CANT_ACCOMMODATE = 5
    """There is no room, whoever may go."""
