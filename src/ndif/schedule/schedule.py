"""Models that are dedicated over windows of time, from an iCalendar text."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone, tzinfo
from itertools import takewhile

from ndif.cluster.calendar.bookings import config_for
from ndif.cluster.calendar.events import Event, EventError, read_events
from ndif.cluster.calendar.occurrences import Occurrence, occurrences
from ndif.schema.deployment import DeploymentConfig

BEHIND = timedelta(days=31)
AHEAD = timedelta(days=400)
"""More than a year, so that what happens once a year is in sight."""

_MOST_PROBLEMS = 100
_INSTANT = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which one model is dedicated, with these settings."""

    config: DeploymentConfig
    start: datetime
    end: datetime
    event: str
    """The event's summary; of several that follow each other, the first one's."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which models are dedicated when: what came of a calendar, between two times.

    All times are absolute; what is asked for may be in any zone.
    """

    timelines: tuple[tuple[Window, ...], ...] = ()
    """The windows of each model, in order; no two of them overlap."""
    problems: tuple[str, ...] = ()
    """Events that could not be read, conflicts, and what was too much to be looked at."""
    since: datetime | None = None
    until: datetime | None = None

    def windows(self, start: datetime, end: datetime) -> tuple[Window, ...]:
        """The windows of every model that have part in the time from `start` to before `end`."""
        found = [
            window
            for timeline in self.timelines
            for window in takewhile(lambda each: each.start < end, _after(timeline, start))
        ]
        return tuple(sorted(found, key=lambda each: (each.start, str(each.config.key))))

    def dedicated_at(self, now: datetime) -> tuple[Window, ...]:
        """The models that are to be dedicated now: each with its settings, and until when."""
        return self.windows(now, now + _INSTANT)

    def next_change(self, now: datetime) -> datetime | None:
        """When the answer of `dedicated_at` is next another one; None: not before `until`."""
        coming = (next(_after(timeline, now), None) for timeline in self.timelines)
        changes = (each.start if each.start > now else each.end for each in coming if each)
        return min(changes, default=None)


def _after(timeline: Sequence[Window], moment: datetime) -> Iterator[Window]:
    """The windows of a timeline that are not over at that moment."""
    first = bisect_right(timeline, moment, key=lambda each: each.end)
    return (timeline[index] for index in range(first, len(timeline)))


def read(
    text: str,
    deployments: Sequence[DeploymentConfig] = (),
    *,
    now: datetime,
    zone: tzinfo = timezone.utc,
    behind: timedelta = BEHIND,
    ahead: timedelta = AHEAD,
) -> Schedule:
    """The schedule that a calendar makes, from some time before `now` to more than a year after it.

    An event names its model by its summary, a repo id or a whole model key, or by `repo_id` in its
    description, which may also give settings as YAML or JSON. What it does not give is as the same
    model has it in `deployments`. Where one model is wanted with two sets of settings at once, the
    event that starts later holds, until its end.

    Whole days and times without a zone are in the zone that the calendar names for itself
    (X-WR-TIMEZONE), or else in `zone`.

    Raises:
        CalendarError: if the text is no calendar.
    """
    calendar = read_events(text, zone)
    since, until = now - behind, now + ahead
    happening, unfollowed = occurrences(calendar, since, until)
    problems = [*calendar.problems, *unfollowed]
    claims = _claims(happening, deployments, problems)
    timelines = tuple(tuple(_settled(each, problems)) for each in claims)
    if len(problems) > _MOST_PROBLEMS:
        more = len(problems) - _MOST_PROBLEMS
        problems[_MOST_PROBLEMS:] = [f"And {more:,} more like these."]
    return Schedule(timelines, tuple(problems), since, until)


@dataclass(frozen=True, slots=True)
class _Claim:
    """What one occurrence asks for."""

    config: DeploymentConfig
    occurrence: Occurrence


def _claims(
    happening: Iterable[Occurrence], deployments: Sequence[DeploymentConfig], problems: list[str]
) -> list[list[_Claim]]:
    """What is asked for of each model, in order of time."""
    configs: dict[int, DeploymentConfig | None] = {}
    claims: dict[tuple[str, str | None, str | None], list[_Claim]] = defaultdict(list)
    for occurrence in happening:
        event = occurrence.event
        if id(event) not in configs:
            try:
                configs[id(event)] = config_for(event, deployments)
            except EventError as error:
                configs[id(event)] = None
                problems.append(f"{event.name} {error}.")
        config = configs[id(event)]
        if config is not None:
            key = config.key
            claims[key.repo_id.lower(), key.revision, key.task].append(_Claim(config, occurrence))
    return list(claims.values())


def _settled(claims: Sequence[_Claim], problems: list[str]) -> Iterator[Window]:
    """One model's windows: overlaps settled, those that follow each other unchanged made one."""
    told: set[tuple[str, str]] = set()
    times = sorted({t for each in claims for t in (each.occurrence.start, each.occurrence.end)})
    active: list[tuple[int, _Claim]] = []
    coming = 0
    window: Window | None = None
    for now in times:
        while coming < len(claims) and claims[coming].occurrence.start <= now:
            _drop_ended(active, now)
            if active:
                _tell_conflict(active[0][1], claims[coming], told, problems)
            # Claims come in order of their start: the last of those that go on holds.
            heapq.heappush(active, (-coming, claims[coming]))
            coming += 1
        _drop_ended(active, now)
        holder = active[0][1] if active else None
        if window is not None and (holder is None or holder.config != window.config):
            yield Window(window.config, window.start, now, window.event)
            window = None
        if window is None and holder is not None:
            window = Window(holder.config, now, now, holder.occurrence.event.summary)


def _drop_ended(active: list[tuple[int, _Claim]], now: datetime) -> None:
    while active and active[0][1].occurrence.end <= now:
        heapq.heappop(active)


def _tell_conflict(
    before: _Claim, after: _Claim, told: set[tuple[str, str]], problems: list[str]
) -> None:
    """Say once of two events that they want one model with different settings at one time."""
    one, other = before.occurrence.event, after.occurrence.event
    pair = (one.uid, other.uid)
    if before.config == after.config or pair in told:
        return
    told.add(pair)
    differ = [
        field.name
        for field in fields(DeploymentConfig)
        if getattr(before.config, field.name) != getattr(after.config, field.name)
    ]
    problems.append(
        f"{after.config.repo_id} is wanted with different {' and '.join(differ)} at the same time, "
        f"{after.occurrence.start:%Y-%m-%d %H:%M} UTC, by {_of(one)} and by {_of(other)}: "
        "the one that starts later holds."
    )


def _of(event: Event) -> str:
    return event.name.removeprefix("The event ")
