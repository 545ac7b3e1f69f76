"""A step in the life of a job: its name, the part of the server that took it, and its times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

GATEWAY, QUEUE, REPLICA, RUNNER = PARTS = ("gateway", "queue", "replica", "runner")
"""Parts of the server that take steps, in the order in which a job comes to them."""


class Step(NamedTuple):
    """A stretch of a job's life. Steps of different parts overlap: a replica runs what the queue sent."""

    name: str
    by: str
    """One of `PARTS`."""
    start: float
    """Unix seconds, by the clock of the machine on which it was."""
    end: float

    @property
    def took_s(self) -> float:
        """Seconds from its start to its end; 0 where a clock was set back meanwhile."""
        return max(0.0, self.end - self.start)


def steps_from(content: Iterable[Any]) -> tuple[Step, ...]:
    """Return the steps in a list of lists, as JSON has them; of parts that this version has not, none."""
    return tuple(Step(*each) for each in content if each[1] in PARTS)
