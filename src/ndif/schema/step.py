"""A step in the life of a job: its name, the part of the server that took it, and its times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

GATEWAY, QUEUE, REPLICA, RUNNER = PARTS = ("gateway", "queue", "replica", "runner")
"""Parts of the server that take steps, in the order in which a job comes to them."""

_ORDER = (
    *(
        "receive",
        "submit",
        "received",
        "queued",
        "provisioning",
        "deploying",
        "dispatched",
        "acquire",
    ),
    *("payload", "send", "running", "prepare", "execute", "pack", "store", "deliver"),
)
"""Steps in the order in which a job takes them."""


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


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Return steps by their beginning; of those that begin at once, those first that a job takes first."""
    return sorted(
        steps,
        key=lambda step: (
            step.start,
            _ORDER.index(step.name) if step.name in _ORDER else len(_ORDER),
            -step.end,
        ),
    )


def steps_from(content: Iterable[Any]) -> tuple[Step, ...]:
    """Return the steps in a list of lists, as JSON has them; of parts that this version has not, none."""
    return tuple(Step(*fields) for fields in content if fields[1] in PARTS)
