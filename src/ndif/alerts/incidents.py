"""Incidents: causes that are reported together, from the first message to their resolution.

A pure state machine. To avoid flapping, a cause must hold for `Timing.hold_s` before it is reported, and be
absent as long before it is over. Failures of models while a store, node or GPU is unavailable belong to the
incident of that store, node or GPU.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ndif.alerts.causes import FOLLOWING, ROOTS, Cause, Findings, Key
from ndif.schema.server_state import ProblemKind as Kind

_MIN_CHANGE_S = 600.0
"""Minimum seconds between messages about changes, because users can make many models fail one by one."""
_KEPT_S = 24 * 3600.0
"""Seconds for which a resolved incident is kept, for the digest and `ndif alerts list`."""
_MAX_RESOLVED = 100
_MAX_ENDED_CAUSES = 50
"""Maximum number of ended causes that an open incident keeps."""


class IncidentEvent(str, Enum):
    """Reasons for a message."""

    OPENED = "opened"
    CHANGED = "changed"
    REPEATED = "repeated"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of incidents, in seconds."""

    hold_s: float = 60.0
    """Time a cause must hold before it is reported, and be absent before it is over."""
    repeat_s: float = 4 * 3600.0
    """Time since the last message after which an open incident is reported again."""


@dataclass(frozen=True, slots=True)
class Member:
    """A cause as a part of an incident."""

    cause: Cause
    seen: float
    """Time at which the cause was last seen to hold."""
    over: float | None = None
    """Time at which the cause ended; None while it holds."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Causes that are reported together."""

    id: str
    kind: Kind
    opened: float
    members: tuple[Member, ...]
    told: float
    """Time of the last message."""
    told_keys: frozenset[Key]
    """Causes that the last message reported as holding."""
    resolved: float | None = None

    @property
    def holding(self) -> frozenset[Key]:
        """Return the keys of the causes that are not over."""
        return frozenset(member.cause.key for member in self.members if member.over is None)


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to send: an incident and its latest event."""

    event: IncidentEvent
    incident: Incident


@dataclass(frozen=True, slots=True)
class Pending:
    """A cause that has not been reported yet."""

    cause: Cause
    first: float
    """Time at which it was first seen."""


@dataclass(frozen=True, slots=True)
class Book:
    """All incidents of a server at one moment."""

    pending: Mapping[Key, Pending] = field(default_factory=dict)
    open: tuple[Incident, ...] = ()
    over: tuple[Incident, ...] = ()
    """Incidents that were resolved during the last day, the oldest first."""


@dataclass(frozen=True, slots=True)
class SavedBook:
    """The incidents that a process saves for its successor."""

    open: tuple[Incident, ...]
    over: tuple[Incident, ...]


def step(
    book: Book,
    findings: Findings,
    now: float,
    timing: Timing,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:8],
) -> tuple[Book, list[Notice]]:
    """Return the incidents after an observation of the server, and the notices to send."""
    holding = {cause.key: cause for cause in findings.causes}
    incidents = [
        _updated(incident, holding, findings.undecided, now, timing) for incident in book.open
    ]
    member_keys = {member.cause.key for incident in incidents for member in incident.members}
    pending = {
        key: _merged(book.pending.get(key), cause, now)
        for key, cause in holding.items()
        if key not in member_keys
    }
    undecided = {
        key: entry
        for key, entry in book.pending.items()
        if key in findings.undecided and key not in member_keys
    }
    root = _root(incidents, pending)
    groups: dict[Kind, list[Pending]] = {}
    for entry in pending.values():
        groups.setdefault(_group(entry.cause.kind, root), []).append(entry)
    for kind, members in groups.items():
        if any(now - entry.first >= timing.hold_s for entry in members):
            incidents = _add_causes(
                incidents, kind, [entry.cause for entry in members], now, new_id
            )
            for entry in members:
                del pending[entry.cause.key]
    notices: list[Notice] = []
    still_open: list[Incident] = []
    over = list(book.over)
    for incident in incidents:
        event = _event(incident, now, timing)
        if event is not None:
            resolved = now if event is IncidentEvent.RESOLVED else None
            reported = replace(incident, told=now, told_keys=incident.holding, resolved=resolved)
            notices.append(Notice(event, reported))
            incident = reported
        (still_open if incident.resolved is None else over).append(incident)
    over = [incident for incident in over if now - (incident.resolved or now) < _KEPT_S][
        -_MAX_RESOLVED:
    ]
    return Book({**undecided, **pending}, tuple(still_open), tuple(over)), notices


def _merged(before: Pending | None, cause: Cause, now: float) -> Pending:
    """Return the pending entry of a cause that holds, with the time at which it was first seen."""
    if before is None:
        return Pending(cause, now)
    since = min(before.cause.since, cause.since)
    return Pending(replace(cause, since=since), before.first)


def _updated(
    incident: Incident,
    holding: Mapping[Key, Cause],
    undecided: frozenset[Key],
    now: float,
    timing: Timing,
) -> Incident:
    """Return the incident with its causes updated."""
    members = []
    for member in incident.members:
        key = member.cause.key
        if key in holding:
            since = member.cause.since if member.over is None else holding[key].since
            cause = replace(holding[key], since=min(since, holding[key].since))
            members.append(Member(cause, now))
        elif member.over is None and key in undecided:
            members.append(replace(member, seen=now))
        elif member.over is None and now - member.seen >= timing.hold_s:
            members.append(replace(member, over=member.seen))
        else:
            members.append(member)
    over = [member for member in members if member.over is not None]
    forgotten = sorted(over, key=lambda member: member.seen)[:-_MAX_ENDED_CAUSES]
    return replace(incident, members=tuple(member for member in members if member not in forgotten))


def _root(incidents: Sequence[Incident], pending: Mapping[Key, Pending]) -> Kind | None:
    """Return the kind of `ROOTS` that began first among the causes that hold; None without one."""
    began = [(incident.opened, key.kind) for incident in incidents for key in incident.holding]
    began = [pair for pair in began if pair[1] in ROOTS]
    began += [(entry.first, key.kind) for key, entry in pending.items() if key.kind in ROOTS]
    return min(began)[1] if began else None


def _group(kind: Kind, root: Kind | None) -> Kind:
    return root if root is not None and kind in FOLLOWING else kind


def _add_causes(
    incidents: list[Incident],
    kind: Kind,
    causes: Iterable[Cause],
    now: float,
    new_id: Callable[[], str],
) -> list[Incident]:
    """Add causes to the incident of a kind, which is opened if there is none."""
    members = tuple(Member(cause, now) for cause in causes)
    for index, incident in enumerate(incidents):
        if incident.kind is kind:
            longer = replace(incident, members=(*incident.members, *members))
            return [*incidents[:index], longer, *incidents[index + 1 :]]
    return [*incidents, Incident(new_id(), kind, now, members, now, frozenset())]


def _event(incident: Incident, now: float, timing: Timing) -> IncidentEvent | None:
    """Return the reason to report an incident now; None if there is none."""
    if not incident.holding:
        return IncidentEvent.RESOLVED
    if not incident.told_keys:
        return IncidentEvent.OPENED
    if now - incident.told >= timing.repeat_s:
        return IncidentEvent.REPEATED
    if incident.holding != incident.told_keys and now - incident.told >= _MIN_CHANGE_S:
        return IncidentEvent.CHANGED
    return None


# Books for the next process


def saved(book: Book) -> SavedBook:
    """Return the incidents for the next process; `loaded` is the inverse, except for pending causes.

    The times at which causes were last seen are left out, so that the content seldom changes.
    """
    return SavedBook(
        tuple(_with_last_seen(incident, 0.0) for incident in book.open),
        tuple(_with_last_seen(incident, 0.0) for incident in book.over),
    )


def loaded(saved: SavedBook, now: float) -> Book:
    """Return the incidents that an earlier process saved.

    Each holding cause counts as seen now, because no process has observed the server meanwhile.
    """
    return Book(
        open=tuple(_with_last_seen(incident, now) for incident in saved.open),
        over=tuple(_with_last_seen(incident, now) for incident in saved.over),
    )


def _with_last_seen(incident: Incident, moment: float) -> Incident:
    members = (m if m.over is not None else replace(m, seen=moment) for m in incident.members)
    return replace(incident, members=tuple(members))


def taken_over(book: Book, earlier: Book) -> Book:
    """Return `book` with the incidents of `earlier`, except open ones whose kind is open in `book`."""
    kinds = {incident.kind for incident in book.open}
    left = tuple(incident for incident in earlier.open if incident.kind not in kinds)
    member_keys = {member.cause.key for incident in left for member in incident.members}
    pending = {key: entry for key, entry in book.pending.items() if key not in member_keys}
    return Book(pending, (*left, *book.open), (*earlier.over, *book.over))
