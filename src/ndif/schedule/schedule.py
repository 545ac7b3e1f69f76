"""Windows of time in which models are dedicated, from a calendar's events."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from itertools import takewhile

from ndif.schedule.event_config import EventConfigError, config_for
from ndif.schedule.expansion import CalendarEvent, Expansion, Occurrence
from ndif.schema.deployment import DeploymentConfig

_MOST_PROBLEMS = 100
_INSTANT = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Window:
    """A period in which one model is dedicated with the same settings."""

    config: DeploymentConfig
    start: datetime
    end: datetime
    event: str
    """Summary of the event; if adjacent events were joined, the first event's summary."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The dedicated models over a period. Times may be in any zone."""

    timelines: tuple[tuple[Window, ...], ...] = ()
    """Windows of each model, in order; no two of them overlap."""
    problems: tuple[str, ...] = ()
    """Sentences about events that could not be read or followed, and about conflicts."""

    def windows(self, start: datetime, end: datetime) -> tuple[Window, ...]:
        """Return the windows of every model that overlap the time from `start` to before `end`."""
        windows = [
            window
            for timeline in self.timelines
            for window in takewhile(
                lambda candidate: candidate.start < end, _ending_after(timeline, start)
            )
        ]
        return tuple(sorted(windows, key=lambda window: (window.start, str(window.config.key))))

    def dedicated_at(self, now: datetime) -> tuple[Window, ...]:
        """Return the windows that are open at `now`."""
        return self.windows(now, now + _INSTANT)

    def next_change(self, now: datetime) -> datetime | None:
        """Return the time of the next change of `dedicated_at`; None if the schedule has no more."""
        upcoming = (next(_ending_after(timeline, now), None) for timeline in self.timelines)
        changes = (
            window.start if window.start > now else window.end for window in upcoming if window
        )
        return min(changes, default=None)


def _ending_after(timeline: Sequence[Window], moment: datetime) -> Iterator[Window]:
    first = bisect_right(timeline, moment, key=lambda window: window.end)
    return (timeline[index] for index in range(first, len(timeline)))


def make_schedule(expansion: Expansion, deployments: Sequence[DeploymentConfig]) -> Schedule:
    """Make a schedule from the occurrences in a calendar.

    An event names its model by its summary (a repo id or a whole model key), or by `repo_id` in its
    description. The description may also give settings as YAML or JSON; the same model in `deployments`
    provides missing ones. If two events ask for different settings of one model at the same time, the event
    that starts later applies until its end.
    """
    problems = [*expansion.problems]
    claims = _claims(expansion.occurrences, deployments, problems)
    timelines = tuple(
        tuple(_settle_overlaps(claims_of_model, problems)) for claims_of_model in claims
    )
    if len(problems) > _MOST_PROBLEMS:
        omitted = len(problems) - _MOST_PROBLEMS
        problems[_MOST_PROBLEMS:] = [f"And {omitted:,} more like these."]
    return Schedule(timelines, tuple(problems))


@dataclass(frozen=True, slots=True)
class _Claim:
    """One occurrence and the settings that it asks for."""

    config: DeploymentConfig
    occurrence: Occurrence


def _claims(
    occurrences: Iterable[Occurrence], deployments: Sequence[DeploymentConfig], problems: list[str]
) -> list[list[_Claim]]:
    """Return the claims on each model, in order of time."""
    configs: dict[CalendarEvent, DeploymentConfig | None] = {}
    claims: dict[tuple[str, str | None, str | None], list[_Claim]] = defaultdict(list)
    for occurrence in occurrences:
        event = occurrence.event
        if event not in configs:
            try:
                configs[event] = config_for(event, deployments)
            except EventConfigError as error:
                configs[event] = None
                problems.append(f"{event.name} {error}.")
        config = configs[event]
        if config is not None:
            key = config.key
            claims[key.repo_id.lower(), key.revision, key.task].append(_Claim(config, occurrence))
    return list(claims.values())


def _settle_overlaps(claims: Sequence[_Claim], problems: list[str]) -> Iterator[Window]:
    """Yield one model's windows: overlaps settled, adjacent windows with the same settings joined."""
    reported: set[tuple[str, str]] = set()
    times = sorted(
        {moment for claim in claims for moment in (claim.occurrence.start, claim.occurrence.end)}
    )
    upcoming = deque(claims)
    active: list[_Claim] = []
    window: Window | None = None
    for now in times:
        while upcoming and upcoming[0].occurrence.start <= now:
            _drop_ended(active, now)
            if active:
                _report_conflict(active[-1], upcoming[0], reported, problems)
            # Claims are in order of their start, so the last active claim applies.
            active.append(upcoming.popleft())
        _drop_ended(active, now)
        holder = active[-1] if active else None
        if window is not None and (holder is None or holder.config != window.config):
            yield Window(window.config, window.start, now, window.event)
            window = None
        if window is None and holder is not None:
            window = Window(holder.config, now, now, holder.occurrence.event.summary)


def _drop_ended(active: list[_Claim], now: datetime) -> None:
    while active and active[-1].occurrence.end <= now:
        active.pop()


def _report_conflict(
    before: _Claim, after: _Claim, reported: set[tuple[str, str]], problems: list[str]
) -> None:
    """Report, once per pair of events, that they ask for different settings of one model at one time."""
    first, second = before.occurrence.event, after.occurrence.event
    pair = (first.uid, second.uid)
    if before.config == after.config or pair in reported:
        return
    reported.add(pair)
    names = [event.name.removeprefix("The event ") for event in (first, second)]
    differ = [
        field.name
        for field in fields(DeploymentConfig)
        if getattr(before.config, field.name) != getattr(after.config, field.name)
    ]
    problems.append(
        f"{after.config.repo_id} is scheduled with different {' and '.join(differ)} at the same time, "
        f"{after.occurrence.start:%Y-%m-%d %H:%M} UTC, by {names[0]} and by {names[1]}: "
        "the event that starts later applies."
    )
