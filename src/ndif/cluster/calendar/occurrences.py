"""When events happen: series, their exceptions and changes, as spans of absolute time."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import icalendar
import recurring_ical_events
from icalendar.prop import vDDDTypes

from ndif.cluster.calendar.events import Event, EventError, Events, Moment
from ndif.cluster.calendar.recurrence import Rule, RuleError, firings, last_of

_MOST_OF_ONE = 50_000
"""Firings of one series that are looked at: hourly for five years, daily for 130."""

_MOST_NEAR = 12_000
"""Firings of one series in the time that is asked for: hourly for more than a year."""

_MOST_OF_ALL = 600_000
"""What a whole calendar may cost; one firing that is looked at costs 1."""

_RULE_COST = 200
"""What a rule costs before it fires."""

_NEAR_COST = 10
"""What a firing costs in the time that is asked for."""

_DAYS_FOR_ONE = 8
"""Days without a firing that cost as much as one."""

_FOREIGN_FACTOR = 10
"""How much fewer may be looked at in a zone that the calendar defines itself."""

_MOST_WIDE_CHANGES = 50
"""Of one series: each is compared with every firing."""

_MARGIN = timedelta(days=1)
_INDEX = "X-NDIF-EVENT"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time that an event happens."""

    event: Event
    start: datetime
    end: datetime


@dataclass(slots=True)
class _Budget:
    """What may still be looked at, and what had to be said."""

    left: int = _MOST_OF_ALL
    skipped: int = 0
    problems: list[str] = field(default_factory=list)


def occurrences(
    calendar: Events, since: datetime, until: datetime
) -> tuple[list[Occurrence], list[str]]:
    """Everything that happens between two times, in order, and what could not be followed."""
    budget = _Budget()
    series: dict[str, list[Event]] = defaultdict(list)
    for event in calendar.events:
        series[event.uid].append(event)
    found: list[Occurrence] = []
    for events in series.values():
        try:
            found += [*_of_series(_Series.of(events, calendar.zone), since, until, budget)]
        except (EventError, RuleError) as error:
            budget.problems.append(f"{events[0].name} {error}.")
        except Exception as error:  # others' code on anybody's calendar
            budget.problems.append(f"{events[0].name} cannot be read ({error}).")
    if budget.skipped:
        budget.problems.append(
            f"The calendar repeats too much: {budget.skipped:,} of its series are not looked at."
        )
    found.sort(key=lambda each: (each.start, each.event.uid))
    return found, budget.problems


@dataclass(frozen=True, slots=True)
class _Series:
    """Events of one UID, and the zone whose clock on the wall they repeat by."""

    master: Event | None
    changes: tuple[Event, ...]
    zone: tzinfo
    days: tzinfo
    """Where whole days and floating times are."""

    @classmethod
    def of(cls, events: Iterable[Event], days: tzinfo) -> _Series:
        """Sort out what the series is and what its changes are."""
        masters = [event for event in events if event.replaces is None]
        master = max(masters, key=lambda event: event.sequence, default=None)
        changes = tuple(event for event in events if event.replaces is not None)
        start = (master or changes[0]).start
        zone = start.tzinfo if isinstance(start, datetime) else None
        return cls(master, changes, zone or days, days)

    @property
    def events(self) -> tuple[Event, ...]:
        """The series and its changes."""
        return (*((self.master,) if self.master else ()), *self.changes)

    @property
    def wide_changes(self) -> list[Event]:
        """The changes of more than one occurrence."""
        return [event for event in self.changes if event.onwards or event.rules]

    def local(self, moment: Moment) -> datetime:
        """On the clock on the wall there, without a zone."""
        if not isinstance(moment, datetime):
            moment = datetime.combine(moment, time())
        if moment.tzinfo is None:
            if self.days is self.zone:
                return moment
            moment = moment.replace(tzinfo=self.days)
        if moment.tzinfo is self.zone:
            return moment.replace(tzinfo=None)
        return moment.astimezone(self.zone).replace(tzinfo=None)

    def absolute(self, moment: datetime) -> datetime:
        """Back from the clock on the wall."""
        return moment.replace(tzinfo=self.zone).astimezone(timezone.utc)

    @property
    def is_foreign(self) -> bool:
        """Whether its zone is one that the calendar defines, whose every offset has to be searched."""
        return self.zone is not self.days and not isinstance(self.zone, ZoneInfo | timezone)


def _of_series(
    series: _Series, since: datetime, until: datetime, budget: _Budget
) -> Iterator[Occurrence]:
    master = series.master
    if master is not None and master.cancelled:
        return
    events = [event for event in series.events if _has_length(series, event, budget)]
    if not (series.changes or (master and master.repeats)):
        spans = [(event, series.local(event.start), series.local(event.end)) for event in events]
    else:
        spans = _expanded(series, events, since, until, budget)
    for event, *span in spans:
        start, end = (series.absolute(moment) for moment in span)
        if not event.cancelled and start < end and start < until and since < end:
            yield Occurrence(event, start, end)


def _has_length(series: _Series, event: Event, budget: _Budget) -> bool:
    if event.cancelled or series.local(event.start) < series.local(event.end):
        return True
    budget.problems.append(f"{event.name} ends when or before it starts.")
    return False


def _expanded(
    series: _Series, events: Sequence[Event], since: datetime, until: datetime, budget: _Budget
) -> list[tuple[Event, datetime, datetime]]:
    """The series by the library: it knows exceptions and changes; the rules are followed here.

    All times are of the clock on the wall, the library's too.
    """
    if len(series.wide_changes) > _MOST_WIDE_CHANGES:
        raise EventError(f"is a series with more than {_MOST_WIDE_CHANGES} changes from a day on")
    # What is on the edge by one clock is sorted out by absolute time afterwards.
    first = series.local(since) - _MARGIN
    last = series.local(until) + _MARGIN
    calendar = icalendar.Calendar()
    for number, event in enumerate(events):
        starts: list[datetime] = []
        if event is series.master:
            if budget.left <= 0:
                budget.skipped += 1
                return []
            rules = [_with_local_until(series, rule) for rule in event.rules]
            ends = [last_of(rule) for rule in rules]
            start = series.local(event.start)
            if ends and all(end is not None and end < start for end in ends):
                continue  # how programs write a series of which nothing is left
            starts = _starts(series, event, rules, first, last, budget)
        calendar.add_component(_component(series, event, number, starts))
    query = recurring_ical_events.CalendarQuery(calendar, components=[_BY_NUMBER])
    return [
        (events[each["number"]], each["start"], each["end"]) for each in query.between(first, last)
    ]


class _Numbered(recurring_ical_events.EventAdapter):  # type: ignore[misc]
    """Has the library name an event that happens, and not copy it, which takes ten times as long."""

    def as_component(
        self, start: datetime, stop: datetime, keep_recurrence_attributes: bool = True
    ) -> dict[str, Any]:
        """What a query gives for each time that it finds."""
        return {"number": int(self._component[_INDEX]), "start": start, "end": stop}


_BY_NUMBER = recurring_ical_events.ComponentsWithName("VEVENT", adapter=_Numbered)


def _starts(
    series: _Series,
    event: Event,
    rules: Sequence[Rule],
    first: datetime,
    last: datetime,
    budget: _Budget,
) -> list[datetime]:
    """When a series fires, its RDATEs included; what is over long since is left out."""
    start = series.local(event.start)
    # A change of all that follow may move them by any time, so all of them matter then.
    near = start if series.wide_changes else first - (series.local(event.end) - start)
    starts = [series.local(moment) for moment in event.extra]
    budget.left -= len(starts)
    factor = _FOREIGN_FACTOR if series.is_foreign else 1
    for rule in rules:
        end = last_of(rule)
        if end is not None and end < near:
            continue
        fired = firings(rule, start, last, max(1, min(_MOST_OF_ONE, budget.left) // factor))
        followed = fired.times[bisect_left(fired.times, near) :]
        budget.left -= _RULE_COST + len(fired.times) + fired.days // _DAYS_FOR_ONE
        budget.left -= _NEAR_COST * factor * len(followed)
        if fired.barren:
            budget.problems.append(f"{event.name} has a rule by which it never happens.")
        elif not fired.complete or len(followed) > _MOST_NEAR:
            followed = followed[:_MOST_NEAR]
            until = (followed or fired.times)[-1]
            budget.problems.append(
                f"{event.name} repeats too often, and is looked at only up to {until:%Y-%m-%d %H:%M}."
            )
        starts += followed
    return starts


def _with_local_until(series: _Series, rule: Rule) -> Rule:
    """The rule with its UNTIL on the clock of the series."""
    return {
        name: [
            series.local(value) if isinstance(value, datetime) and value.tzinfo else value
            for value in (values if isinstance(values, list) else [values])
        ]
        for name, values in rule.items()
    }


def _component(series: _Series, event: Event, number: int, starts: Sequence[datetime]) -> Any:
    """The event for the library: local times, and starts in place of rules."""
    component = icalendar.Event()
    component.add("UID", "series")
    component.add(_INDEX, str(number))
    component.add("SEQUENCE", event.sequence)
    component.add("DTSTART", series.local(event.start))
    component.add("DTEND", series.local(event.end))
    if starts:
        component.add("RDATE", starts)
    if event.excluded:
        whole_days = not isinstance(event.start, datetime)
        component.add("EXDATE", [_excluded(series, each, whole_days) for each in event.excluded])
    if event.replaces is not None:
        stands_for = vDDDTypes(series.local(event.replaces))
        if event.onwards:
            stands_for.params["RANGE"] = "THISANDFUTURE"
        component.add("RECURRENCE-ID", stands_for)
        if event.rules:
            # Only that there is one matters here: it tells a change that is out of date.
            component.add("RDATE", series.local(event.replaces))
    return component


def _excluded(series: _Series, moment: Moment, whole_days: bool) -> Moment:
    """Some programs exclude a day to mean whatever starts in it."""
    return moment if type(moment) is date and not whole_days else series.local(moment)
