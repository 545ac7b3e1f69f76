"""Occurrences of the events of an iCalendar text (RFC 5545), by libraries in a process with limits.

    python -m ndif.schedule.expansion ZONE SINCE UNTIL < calendar.ics > expansion.json

A recurrence rule of one line can keep the libraries busy for hours, and whoever may edit a calendar may
write one. So the process has limits of CPU time and memory, and each series a smaller one of CPU time. The
server reads only the result: which event happens when, and sentences about what is left out. A usual
calendar costs 0.15 s of CPU time, and one of 20,000 events 10 s.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import time as clock
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from functools import partial
from types import FrameType
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import icalendar
import recurring_ical_events
from dateutil.tz import tzlocal
from icalendar.prop import vBroken, vDDDTypes, vRecur
from icalendar.timezone import tzp

CPU_S = 30
"""CPU time after which the kernel ends the process, in seconds."""
MEMORY_BYTES = 512 * 1024**2
"""Address space of the process; the largest calendars take 160 MB."""

LOCAL = "local"
"""The zone of the machine's own clock."""

_SHOWN = 80
"""Characters of a calendar's text that a sentence repeats."""
_MARGIN = timedelta(days=1)
_INDEX = "X-NDIF-EVENT"
_NEEDED = frozenset(
    {"UID", "SUMMARY", "DESCRIPTION", "STATUS", "SEQUENCE", "RECURRENCE-ID"}
    | {"DTSTART", "DTEND", "DURATION", "RRULE", "RDATE", "EXRULE", "EXDATE"}
)
"""Properties of an event that are read. The others may be long or malformed, and do not matter."""
_RULE_PARTS = frozenset(
    {"FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYDAY", "BYHOUR", "BYMINUTE", "BYMONTH"}
    | {"BYMONTHDAY", "BYSECOND", "BYSETPOS", "BYWEEKNO", "BYYEARDAY"}
)

T = TypeVar("T")
Moment = date | datetime
"""A whole day, or a time: with a zone, or without one where the event floats."""


class CalendarError(ValueError):
    """The text cannot be used as a calendar; the message says why."""


class _EventError(ValueError):
    """An event cannot be read; the message says why, as the rest of a sentence about the event."""


class _CpuTimeError(BaseException):
    """A part of the calendar takes too long. Not an `Exception`, so that no library catches it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """CPU time and results that a calendar may cost before the rest of it is skipped."""

    series_cpu_s: float = 2.0
    """CPU seconds for one event or series; one that is hourly since 2001 takes half of it."""
    all_cpu_s: float = 20.0
    """CPU seconds for the whole calendar."""
    occurrences: int = 100_000
    """Occurrences in the whole calendar."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Event:
    """The text of one event, or of a change to one occurrence of a series."""

    uid: str
    summary: str
    description: str
    name: str
    """Subject of a sentence about the event."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time at which an event happens."""

    event: Event
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Expansion:
    """Every occurrence between two times, in order, and a sentence about each event that is left out."""

    occurrences: tuple[Occurrence, ...]
    problems: tuple[str, ...]

    def to_json(self) -> str:
        """Serialise; `from_json` is the inverse."""
        events = list({id(each.event): each.event for each in self.occurrences}.values())
        index = {id(event): position for position, event in enumerate(events)}
        return json.dumps(
            {
                "events": [asdict(event) for event in events],
                "occurrences": [
                    [index[id(each.event)], each.start.timestamp(), each.end.timestamp()]
                    for each in self.occurrences
                ],
                "problems": self.problems,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Expansion:
        """Read what `to_json` wrote.

        Raises:
            CalendarError: if the process wrote that the text is no calendar.
        """
        found = json.loads(text)
        if "error" in found:
            raise CalendarError(found["error"])
        events = [Event(**event) for event in found["events"]]
        return cls(
            tuple(
                Occurrence(events[index], _utc(start), _utc(end))
                for index, start, end in found["occurrences"]
            ),
            tuple(found["problems"]),
        )


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def main() -> None:
    """Expand the calendar on standard input, within the limits of a process."""
    zone_name, since, until = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    zone = tzlocal() if zone_name == LOCAL else ZoneInfo(zone_name)
    moments = datetime.fromisoformat(since), datetime.fromisoformat(until)
    try:
        print(expand(sys.stdin.buffer.read(), zone, *moments).to_json())
    except CalendarError as error:
        print(json.dumps({"error": str(error)}))


def expand(
    content: bytes, zone: tzinfo, since: datetime, until: datetime, limits: Limits = DEFAULT_LIMITS
) -> Expansion:
    """Work out what happens between two times, each event apart so that none can spoil the others.

    Days and floating times are in the zone that the calendar names for itself (X-WR-TIMEZONE), or else in
    `zone`. Limits are enforced by signals, so this runs in a main thread.

    Raises:
        CalendarError: if the text is no calendar, or was cut off.
    """
    # Of "/vendor/Europe/Berlin" the library prints what no operator could act on.
    warnings.filterwarnings("ignore", message="Timezone .* is a globally unique TZID")
    # Malformed text in one event is no reason to lose the others.
    lines = _unfolded(content.decode("utf-8-sig", errors="replace"))
    own = _properties(lines)
    if own.get("CALSCALE", "").upper() not in ("", "GREGORIAN"):
        raise CalendarError(f"its days are not Gregorian, but {own['CALSCALE'][:_SHOWN]!r}")
    expanding = _Expanding(since, until, limits)
    if name := own.get("X-WR-TIMEZONE"):
        try:
            zone = ZoneInfo(name)
        except (ValueError, OSError, LookupError):
            expanding.problems.append(
                f"The calendar's own time zone, {name[:_SHOWN]!r}, is not known."
            )
    series: dict[str, list[_Read]] = defaultdict(list)
    before = signal.signal(signal.SIGPROF, _interrupt)
    try:
        tzp.use_zoneinfo()  # and forget the zones of another calendar
        for block in _blocks(lines, "VTIMEZONE"):
            name = _properties(block).get("TZID", "")[:_SHOWN]
            expanding.attempt(f"The time zone {name!r}", partial(_learn_zone, block))
        for block in _blocks(lines, "VEVENT"):
            event = expanding.attempt(_raw_name(block), partial(_read, block))
            if event is not None:
                series[event.event.uid].append(event)
        for events in series.values():
            expanding.attempt(events[0].event.name, partial(expanding.add_series, events, zone))
    finally:
        signal.signal(signal.SIGPROF, before)
    if expanding.skipped:
        expanding.problems.append(
            f"The calendar repeats too much: {expanding.skipped:,} of its events are not looked at."
        )
    found = sorted(expanding.found, key=lambda each: (each.start, each.event.uid))
    return Expansion(tuple(found), tuple(expanding.problems))


# Lines and components


def _unfolded(text: str) -> list[str]:
    """Return the content lines, after a check that the calendar is whole."""
    text = text.lstrip("\ufeff \t\r\n").replace("\r\n", "\n").replace("\r", "\n")
    if not text[:15].upper().startswith("BEGIN:VCALENDAR"):
        start = text.split("\n", 1)[0][:_SHOWN]
        raise CalendarError(f"it is no calendar: it begins with {start!r}")
    lines = text.replace("\n ", "").replace("\n\t", "").rstrip().split("\n")
    if lines[-1].strip().upper() != "END:VCALENDAR":
        raise CalendarError("it is cut off: it does not end with END:VCALENDAR")
    return [line for line in lines if line.strip()]


def _blocks(lines: Sequence[str], name: str) -> Iterator[list[str]]:
    """Yield the lines of every component `name`, BEGIN and END included."""
    block: list[str] | None = None
    for line in lines:
        mark = line[:20].rstrip().upper()
        if mark == f"BEGIN:{name}":
            block = []
        if block is not None:
            block.append(line)
            if mark == f"END:{name}":
                yield block
                block = None


def _own_lines(block: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each line of a component that belongs to no component in it, after its property's name."""
    depth = 0
    for line in block:
        name = line.partition(":")[0].partition(";")[0].strip().upper()
        depth += (name == "BEGIN") - (name == "END")
        if depth == 1 and name != "BEGIN":
            yield name, line


def _properties(block: Sequence[str]) -> dict[str, str]:
    """Return the raw values of a component's own properties."""
    found: dict[str, str] = {}
    for name, line in _own_lines(block):
        found.setdefault(name, line.partition(":")[2].strip())
    return found


def _named(summary: str, day: str) -> str:
    """Return the subject of a sentence about an event."""
    text = " ".join(summary.split())
    short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"The event {short!r} of {day}" if day else f"The event {short!r}"


def _raw_name(block: Sequence[str]) -> str:
    """Return the subject of a sentence about an event that could not be read."""
    raw = _properties(block)
    day = raw.get("DTSTART", "")[:8]
    day = f"{day[:4]}-{day[4:6]}-{day[6:]}" if day.isdigit() else day
    return _named(raw.get("SUMMARY", "").replace("\\,", ","), day)


def _learn_zone(block: Sequence[str]) -> None:
    """Register a zone with the library that the calendar defines and the system does not.

    Events in a zone that cannot be read are reported one by one.
    """
    with contextlib.suppress(Exception):  # others' code on anybody's text
        name = _properties(block)["TZID"]
        with contextlib.suppress(OSError, ValueError):  # "America" is a folder of zones
            if tzp.timezone(name) is not None:
                return
        icalendar.Timezone.from_ical("\r\n".join(block))


# One event


@dataclass(frozen=True, slots=True)
class _Read:
    """One VEVENT as it is read: an event, a series, or a change to one."""

    event: Event
    start: Moment
    end: Moment
    rules: tuple[Any, ...]
    extra: tuple[Moment, ...]
    """Further starts (RDATE)."""
    excluded: tuple[Moment, ...]
    replaces: Moment | None
    """Occurrence that a change stands for (RECURRENCE-ID)."""
    onwards: bool
    """The change is for all later occurrences, too."""
    cancelled: bool
    sequence: int

    @property
    def repeats(self) -> bool:
        """Return True if the event may happen more than once, or not at all."""
        return bool(self.rules or self.extra or self.excluded)


def _read(block: Sequence[str]) -> _Read:
    kept = [line for name, line in _own_lines(block) if name in _NEEDED]
    try:
        component = icalendar.Event.from_ical("\r\n".join([block[0], *kept, block[-1]]))
    except OSError as error:  # the zone's name is that of a folder of zones, like "America"
        raise _EventError("is in a time zone that is not known") from error
    if "EXRULE" in component:
        raise _EventError("has an EXRULE, which is no longer part of the format: use EXDATE")
    summary, description = (_text(component, name) for name in ("SUMMARY", "DESCRIPTION"))
    cancelled = _text(component, "STATUS").upper() == "CANCELLED"
    start = _moment(component, "DTSTART")
    if start is None:
        raise _EventError("has no start")
    replaces = _moment(component, "RECURRENCE-ID")
    rules = _values(component, "RRULE")
    for rule in rules:
        _check_rule(rule)
    sequence = component.get("SEQUENCE")
    return _Read(
        Event(
            _text(component, "UID") or f"{summary}\n{start}",
            summary.strip(),
            description,
            _named(summary.strip(), f"{start:%Y-%m-%d}"),
        ),
        start,
        end=start if cancelled else _end(component, start),
        rules=tuple(rules),
        extra=_moments(component, "RDATE"),
        excluded=_moments(component, "EXDATE"),
        replaces=replaces,
        onwards=replaces is not None
        and component["RECURRENCE-ID"].params.get("RANGE") == "THISANDFUTURE",
        cancelled=cancelled,
        sequence=sequence if isinstance(sequence, int) else 0,
    )


def _check_rule(rule: Any) -> None:
    """Raise for a rule that the libraries do not refuse in words that its author understands."""
    if isinstance(rule, vBroken):
        raise _EventError(f"has a rule that is not valid: {str(rule)[:_SHOWN]!r}")
    if unknown := sorted(rule.keys() - _RULE_PARTS):
        raise _EventError(f"has a rule with {unknown[0]}, which is not supported")
    if not rule.get("FREQ"):
        raise _EventError("has a rule without a FREQ")
    if any(number < 1 for number in rule.get("INTERVAL", ())):
        raise _EventError("has a rule whose INTERVAL is not a positive number")


def _values(component: Any, name: str) -> list[Any]:
    value = component.get(name) or []
    return value if isinstance(value, list) else [value]


def _text(component: Any, name: str) -> str:
    return str(next(iter(_values(component, name)), ""))


def _moment(component: Any, name: str) -> Moment | None:
    values = _values(component, name)
    if len(values) > 1:
        raise _EventError(f"has more than one {name}")
    return _checked(_value(values[0]), values[0], name) if values else None


def _moments(component: Any, name: str) -> tuple[Moment, ...]:
    return tuple(
        # A period counts from its start; the occurrence is as long as the event.
        _checked(moment[0] if isinstance(moment, tuple) else moment, value, name)
        for value in _values(component, name)
        for moment in ([None] if isinstance(value, vBroken) else map(_value, value.dts))
    )


def _value(value: Any) -> object:
    return None if isinstance(value, vBroken) else getattr(value, "dt", None)


def _checked(moment: object, value: Any, name: str) -> Moment:
    if not isinstance(moment, date):
        raise _EventError(f"has a {name} that is no date: {str(value)[:_SHOWN]!r}")
    zone = value.params.get("TZID")
    if zone and isinstance(moment, datetime) and moment.tzinfo is None:
        raise _EventError(f"is in the time zone {str(zone)[:_SHOWN]!r}, which is not known")
    return moment


def _end(component: Any, start: Moment) -> Moment:
    end = _moment(component, "DTEND")
    if end is not None:
        return end
    if "DURATION" not in component:
        if isinstance(start, datetime):
            raise _EventError("has no end")
        return start + timedelta(days=1)
    lasts = _value(component["DURATION"])
    if not isinstance(lasts, timedelta):
        raise _EventError("has a DURATION that is none")
    try:
        if isinstance(start, datetime) or not lasts.seconds:
            return start + lasts
        return datetime.combine(start, time()) + lasts
    except OverflowError as error:
        raise _EventError("lasts beyond the year 9999") from error


# Series


class _Expanding:
    """A calendar while it is expanded: what was found, and what is left of its limits."""

    def __init__(self, since: datetime, until: datetime, limits: Limits) -> None:
        self.found: list[Occurrence] = []
        self.problems: list[str] = []
        self.skipped = 0
        """Events and series for which nothing was left of the limits."""
        self._since, self._until = since, until
        self._limits = limits
        self._ends_at = clock.process_time() + limits.all_cpu_s

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """Return the result of a part of the work; turn failure and excess into a problem."""
        left_s = min(self._limits.series_cpu_s, self._ends_at - clock.process_time())
        if left_s <= 0 or len(self.found) >= self._limits.occurrences:
            self.skipped += 1
            return None
        try:
            # Repeated, because an exception that a signal raises in a destructor is lost.
            signal.setitimer(signal.ITIMER_PROF, left_s, 0.1)
            return work()
        except _CpuTimeError:
            self.problems.append(f"{name} repeats too often to be followed.")
        except _EventError as error:
            self.problems.append(f"{name} {error}.")
        except Exception as error:  # others' code on anybody's text
            self.problems.append(f"{name} cannot be read ({error}).")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return None

    def add_series(self, events: Sequence[_Read], days: tzinfo) -> None:
        """Find the occurrences of the events of one UID; whole days and floating times are in `days`.

        The library is given times of the wall clock that the series repeats by, without a zone: with
        zones, it compares times of different zones wrongly, and an UNTIL with the wrong clock.
        """
        masters = [event for event in events if event.replaces is None]
        master = max(masters, key=lambda event: event.sequence, default=None)
        changes = [event for event in events if event.replaces is not None]
        if master is not None and master.cancelled:
            return
        first = (master or changes[0]).start
        zone = (first.tzinfo if isinstance(first, datetime) else None) or days

        def local(moment: Moment) -> datetime:
            if not isinstance(moment, datetime):
                moment = datetime.combine(moment, time())
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=days)
            return moment.astimezone(zone).replace(tzinfo=None)

        calendar = icalendar.Calendar()
        numbered = [*([master] if master else []), *changes]
        for number, event in enumerate(numbered):
            if event.cancelled or local(event.start) < local(event.end):
                calendar.add_component(_component(event, number, local))
            else:
                self.problems.append(f"{event.event.name} ends when or before it starts.")
        query = recurring_ical_events.CalendarQuery(calendar, components=[_BY_NUMBER])
        # Times on the edge by the wall clock are sorted out by absolute time.
        found = query.between(local(self._since) - _MARGIN, local(self._until) + _MARGIN)
        for each in found:
            event = numbered[each["number"]]
            start, end = (
                each[edge].replace(tzinfo=zone).astimezone(timezone.utc)
                for edge in ("start", "end")
            )
            if not event.cancelled and start < end and start < self._until and self._since < end:
                self.found.append(Occurrence(event.event, start, end))


class _Numbered(recurring_ical_events.EventAdapter):  # type: ignore[misc]
    """An adapter that names an event instead of copying it, which takes ten times as long."""

    def as_component(
        self, start: datetime, stop: datetime, keep_recurrence_attributes: bool = True
    ) -> dict[str, Any]:
        """Return the result of a query for one occurrence."""
        return {"number": int(self._component[_INDEX]), "start": start, "end": stop}


_BY_NUMBER = recurring_ical_events.ComponentsWithName("VEVENT", adapter=_Numbered)


def _component(event: _Read, number: int, local: Callable[[Moment], datetime]) -> Any:
    """Return the event for the library, with times of the wall clock."""
    component = icalendar.Event()
    component.add("UID", "series")
    component.add(_INDEX, str(number))
    component.add("SEQUENCE", event.sequence)
    component.add("DTSTART", local(event.start))
    component.add("DTEND", local(event.end))
    for rule in event.rules:
        until = [_last(moment, local) for moment in rule.get("UNTIL", ())]
        component.add("RRULE", vRecur({**rule, **({"UNTIL": until} if until else {})}))
    if event.extra:
        component.add("RDATE", [local(moment) for moment in event.extra])
    if event.excluded:
        # Some programs exclude a day to mean whatever starts in it.
        timed = isinstance(event.start, datetime)
        component.add(
            "EXDATE",
            [each if type(each) is date and timed else local(each) for each in event.excluded],
        )
    if event.replaces is not None:
        replaces = vDDDTypes(local(event.replaces))
        if event.onwards:
            replaces.params["RANGE"] = "THISANDFUTURE"
        component.add("RECURRENCE-ID", replaces)
    return component


def _last(until: Moment, local: Callable[[Moment], datetime]) -> datetime:
    """Return the last moment of a rule: an UNTIL that is a day means all of it."""
    if isinstance(until, datetime):
        return local(until) if until.tzinfo else until
    return datetime.combine(until, time(23, 59, 59))


def _interrupt(_: int, __: FrameType | None) -> None:
    raise _CpuTimeError


if __name__ == "__main__":
    main()
