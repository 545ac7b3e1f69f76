"""The outcomes of a server's own probes of the last day, and what they add up to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ndif.probe.outcome import Outcome, Value
from ndif.probe.probe import Target
from ndif.schema.answer import project
from ndif.schema.server_state import Probe, PublicProbe
from ndif.schema.states import ProbeKind

_KEPT_S = 24 * 3600.0
_MOST = 1440
"""One a minute for a day."""
_DIGITS = 4


@dataclass(eq=False)
class History:
    """The outcomes of one target that say how it is served."""

    first: Value | None = None
    """Value of the first probe that succeeded, with which later ones are compared."""
    withdrawals: int = 0
    """Times that an operator had evicted the model when its first value came."""
    last: Outcome | None = None
    """The last outcome of any kind."""
    at: float = 0.0
    """Unix seconds of the last outcome."""
    up: bool | None = None
    """True if the last outcome that counts is a success; None before there is one."""
    _counted: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_MOST))

    def note(self, outcome: Outcome, now: float) -> None:
        """Add an outcome; a model that is loading, or cannot be probed, was neither up nor down."""
        self.last, self.at = outcome, now
        if outcome.kind in (ProbeKind.LOADING, ProbeKind.UNSUPPORTED):
            return
        self.up = not outcome.failed
        self._counted.append((now, self.up))
        if self.first is None and self.up:
            self.first = outcome.value

    def public(self, now: float) -> PublicProbe | None:
        """Return the facts that anybody may know; None before the first probe."""
        if self.last is None:
            return None
        while self._counted and self._counted[0][0] < now - _KEPT_S:
            self._counted.popleft()
        counted = len(self._counted)
        share = sum(up for _, up in self._counted) / counted if counted else None
        return PublicProbe(
            outcome=self.last.kind,
            at=round(self.at, 3),
            seconds=None if self.last.seconds is None else round(self.last.seconds, _DIGITS),
            up=self.up,
            up_share=None if share is None else round(share, _DIGITS),
            probes=counted,
        )


@dataclass(eq=False)
class Histories:
    """The history of each target that is probed, for as long as its process leads."""

    now: Callable[[], float] = time.time
    _of: dict[Target, History] = field(default_factory=dict)

    def of(self, target: Target, withdrawals: int = 0) -> History:
        """Return a target's history.

        An operator who evicts a model may deploy another under its name: its first value is forgotten.
        """
        history = self._of.setdefault(target, History(withdrawals=withdrawals))
        if history.withdrawals != withdrawals:
            history.first, history.withdrawals = None, withdrawals
        return history

    def first_of(self, target: Target) -> Value | None:
        """Return the first value of a target, or else of its model in another generation."""
        values = [
            history.first
            for other, history in self._of.items()
            if other.label == target.label and history.first is not None
        ]
        own = self._of[target].first if target in self._of else None
        return own or next(iter(values), None)

    def keep(self, targets: Collection[Target]) -> None:
        """Forget all other targets."""
        for gone in self._of.keys() - set(targets):
            del self._of[gone]

    def public(self, target: Target) -> PublicProbe | None:
        """Return the facts that anybody may know of a target; None if it was not probed."""
        history = self._of.get(target)
        return None if history is None else history.public(self.now())

    def for_operator(self, target: Target) -> Probe | None:
        """Return the same with the reason of a failure."""
        found = self.public(target)
        if found is None:
            return None
        last = self._of[target].last
        return project(Probe, found, reason=(last.reason if last else "") or None)
