"""Outcomes of a server's own probes in the last day, and their summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ndif.probe.outcome import ProbeOutcome, Value
from ndif.probe.probe import Target
from ndif.schema.answer import project
from ndif.schema.server_state import Probe, PublicProbe
from ndif.schema.states import ProbeKind

_KEPT_S = 24 * 3600.0
_MAX_COUNTED = 1440
"""One outcome per minute for a day."""
_DIGITS = 4


@dataclass(eq=False)
class ProbeHistory:
    """The outcomes of one target, and its first value for comparison."""

    first: Value | None = None
    """Value of the first successful probe, with which later values are compared."""
    withdrawals: int = 0
    """Number of evictions by an operator for which `first` is valid."""
    last: ProbeOutcome | None = None
    """The last outcome of any kind."""
    at: float = 0.0
    """Unix seconds of the last outcome."""
    up: bool | None = None
    """True if the last counted outcome is a success; None before the first."""
    _counted: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_MAX_COUNTED))

    def record(self, outcome: ProbeOutcome, now: float) -> None:
        """Add an outcome; LOADING and UNSUPPORTED count neither as up nor as down."""
        self.last, self.at = outcome, now
        if outcome.kind in (ProbeKind.LOADING, ProbeKind.UNSUPPORTED):
            return
        self.up = not outcome.failed
        self._counted.append((now, self.up))
        if self.first is None and self.up:
            self.first = outcome.value

    def public(self, now: float) -> PublicProbe | None:
        """Return the public summary of the last day; None before the first probe."""
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
    """The histories of all probed targets; they last as long as the leader's process."""

    now: Callable[[], float] = time.time
    _by_target: dict[Target, ProbeHistory] = field(default_factory=dict)

    def of(self, target: Target, withdrawals: int = 0) -> ProbeHistory:
        """Return the history of a target; discard its first value if `withdrawals` has changed.

        An operator who evicts a model may deploy another one under the same name.
        """
        history = self._by_target.setdefault(target, ProbeHistory(withdrawals=withdrawals))
        if history.withdrawals != withdrawals:
            history.first, history.withdrawals = None, withdrawals
        return history

    def first_of(self, target: Target) -> Value | None:
        """Return the first value of a target, else of its model in another generation, else None."""
        values = [
            history.first
            for other, history in self._by_target.items()
            if other.label == target.label and history.first is not None
        ]
        own = self._by_target[target].first if target in self._by_target else None
        return own or next(iter(values), None)

    def keep(self, targets: Collection[Target]) -> None:
        """Forget all other targets."""
        for target in self._by_target.keys() - set(targets):
            del self._by_target[target]

    def public(self, target: Target) -> PublicProbe | None:
        """Return the public summary of a target; None if it was not probed."""
        history = self._by_target.get(target)
        return None if history is None else history.public(self.now())

    def for_operator(self, target: Target) -> Probe | None:
        """Return the summary of a target with the reason of a failure; None if it was not probed."""
        summary = self.public(target)
        if summary is None:
            return None
        last = self._by_target[target].last
        return project(Probe, summary, reason=(last.reason if last else "") or None)
