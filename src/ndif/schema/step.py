"""A step of a job: its name, the part of the server that performed it, and its times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

GATEWAY, QUEUE, REPLICA, RUNNER = PARTS = ("gateway", "queue", "replica", "runner")
"""Parts of the server that perform steps, in the order in which they receive a job."""

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
"""Names of steps in the order in which a job passes them."""


class Step(NamedTuple):
    """A time span of a job. Steps of different parts may overlap: a replica runs a job of the queue."""

    name: str
    by: str
    """One of `PARTS`."""
    start: float
    """Unix time by the clock of the machine that performed the step."""
    end: float

    @property
    def took_s(self) -> float:
        """Seconds from start to end; 0 if the clock was set back meanwhile."""
        return max(0.0, self.end - self.start)


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Return the steps by their start, and equal starts in the order in which a job passes them."""
    return sorted(
        steps,
        key=lambda step: (
            step.start,
            _ORDER.index(step.name) if step.name in _ORDER else len(_ORDER),
            -step.end,
        ),
    )


def steps_from(content: Iterable[Any]) -> tuple[Step, ...]:
    """Return the steps in lists of JSON; leave out steps of parts that this version does not know."""
    return tuple(Step(*fields) for fields in content if fields[1] in PARTS)
