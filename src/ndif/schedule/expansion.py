"""Expansion of an iCalendar text (RFC 5545) into occurrences, in a process with limits.

    python -m ndif.schedule.expansion ZONE SINCE UNTIL < calendar.ics > expansion.json

A recurrence rule of one line can keep the libraries busy for hours, and every editor of a calendar may
write one. So the process has limits of CPU time and memory, and each series has a smaller limit of CPU
time. The server reads only the result: occurrences, and sentences about events that are left out.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import time as clock
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from types import FrameType
from typing import Any
from zoneinfo import ZoneInfo

import recurring_ical_events
from dateutil.tz import tzlocal
from icalendar.cal import ComponentFactory
from icalendar.parser.ical.calendar import CalendarIcalParser
from icalendar.prop import TypesFactory, vBroken, vDDDTypes, vRecur
from icalendar.timezone import tzp
from icalendar.timezone.zoneinfo import ZONEINFO

CPU_S = 30
"""CPU time after which the kernel ends the process, in seconds."""
MEMORY_BYTES = 512 * 1024**2
"""Address space of the process; the largest calendars take 260 MB."""

LOCAL = "local"
"""The zone of the machine's own clock."""

_MAX_SHOWN = 80
"""Maximum characters of a calendar's text in a message."""
_MARGIN = timedelta(days=1)
_DATES = ("DTSTART", "DTEND", "RECURRENCE-ID", "RDATE", "EXDATE")
_SINGLE = ("DTSTART", "DTEND", "DURATION", "RECURRENCE-ID")
_RULE_PARTS = frozenset(vRecur.canonical_order) - {"RSCALE", "SKIP"}


class CalendarError(ValueError):
    """The text cannot be used as a calendar; the message says why."""


class _EventError(ValueError):
    """An event cannot be read; the message completes a sentence about the event."""


class _CpuTimeError(BaseException):
    """A series takes too long. Not an `Exception`, so that no library catches it."""


@dataclass(frozen=True, slots=True)
class ExpansionLimits:
    """CPU time and results that a calendar may cost before the rest of it is skipped."""

    series_cpu_s: float = 2.0
    """CPU seconds for one event or series; an hourly series since 2001 takes half of them."""
    all_cpu_s: float = 20.0
    """CPU seconds for the whole calendar."""
    occurrences: int = 100_000
    """Occurrences in the whole calendar."""


DEFAULT_LIMITS = ExpansionLimits()


@dataclass(frozen=True, slots=True)
class CalendarEvent:
    """The text of one event, or of a change to one occurrence of a series."""

    uid: str
    summary: str
    description: str
    name: str
    """Subject of a sentence about the event."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time at which an event happens."""

    event: CalendarEvent
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Expansion:
    """Every occurrence between two times, in order, and a sentence about each event that is left out."""

    occurrences: tuple[Occurrence, ...]
    problems: tuple[str, ...]

    def to_json(self) -> str:
        """Serialise; `from_json` is the inverse."""
        distinct = dict.fromkeys(occurrence.event for occurrence in self.occurrences)
        index = {event: position for position, event in enumerate(distinct)}
        occurrences = [
            (index[occurrence.event], occurrence.start.timestamp(), occurrence.end.timestamp())
            for occurrence in self.occurrences
        ]
        events = [asdict(event) for event in index]
        return json.dumps({"events": events, "occurrences": occurrences, "problems": self.problems})

    @classmethod
    def from_json(cls, text: str | bytes) -> Expansion:
        """Read the output of `main`; raise CalendarError if it contains an error."""
        document = json.loads(text)
        if "error" in document:
            raise CalendarError(document["error"])
        events = [CalendarEvent(**event) for event in document["events"]]
        occurrences = (
            Occurrence(
                events[index],
                *(datetime.fromtimestamp(timestamp, timezone.utc) for timestamp in span),
            )
            for index, *span in document["occurrences"]
        )
        return cls(tuple(occurrences), tuple(document["problems"]))


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
    content: bytes,
    zone: tzinfo,
    since: datetime,
    until: datetime,
    limits: ExpansionLimits = DEFAULT_LIMITS,
) -> Expansion:
    """Return the occurrences between two times; a failing series does not affect the others.

    Days and floating times are in the calendar's own time zone (X-WR-TIMEZONE), or else in `zone`. Signals
    enforce the limits, so this must run in the main thread. Raises `CalendarError`.
    """
    ends_at = clock.process_time() + limits.all_cpu_s
    calendars = _parse(content)
    occurrences: list[Occurrence] = []
    problems: list[str] = []
    if name := _text(calendars[0], "X-WR-TIMEZONE"):
        try:
            zone = ZoneInfo(name)
        except (ValueError, OSError, LookupError):
            problems.append(f"The calendar's own time zone, {name[:_MAX_SHOWN]!r}, is not known.")
    series: dict[str, list[Any]] = defaultdict(list)
    events = (event for calendar in calendars for event in calendar.walk("VEVENT"))
    for number, event in enumerate(events):
        series[_text(event, "UID") or str(number)].append(event)
    skipped = 0
    for uid, events_of_series in series.items():
        left_s = min(limits.series_cpu_s, ends_at - clock.process_time())
        if left_s <= 0 or len(occurrences) >= limits.occurrences:
            skipped += 1
            continue
        try:
            with _cpu_time(left_s):
                occurrences += _occurrences(uid, events_of_series, zone, (since, until), problems)
        except _CpuTimeError:
            problems.append(f"{_name(events_of_series[0])} repeats too often to be followed.")
        except Exception as error:  # library code on untrusted text
            problems.append(f"{_name(events_of_series[0])} cannot be read ({error}).")
    if skipped:
        problems.append(f"The calendar repeats too much: {skipped:,} of its events are skipped.")
    occurrences.sort(key=lambda occurrence: (occurrence.start, occurrence.event.uid))
    return Expansion(tuple(occurrences), tuple(problems))


class _Parser(CalendarIcalParser):  # type: ignore[misc]
    """The library's parser, which keeps a component whose lines or properties are malformed."""

    def handle_line_parse_error(self, exception: Exception) -> None:
        """Skip the line."""

    def handle_property(self, name: str, params: Any, vals: str, line: Any) -> None:
        """Add a property, as `vBroken` if it cannot be read."""
        try:
            super().handle_property(name, params, vals, line)
        except Exception:  # library code on untrusted text
            self.component.add(name, vBroken(vals), encode=False)


class _Zones(ZONEINFO):  # type: ignore[misc]
    """The zones of the system and of the calendar; an unreadable zone counts as unknown."""

    def timezone(self, name: str) -> Any:
        with suppress(OSError):  # "America" is a folder of zones
            return super().timezone(name)
        return None

    def create_timezone(self, tz: Any) -> Any:
        with suppress(Exception):  # library code on untrusted text
            return super().create_timezone(tz)
        return None


def _parse(content: bytes) -> list[Any]:
    # The library warns about names like "/vendor/Europe/Berlin", but no operator can act on that.
    warnings.filterwarnings("ignore", message="Timezone .* is a globally unique TZID")
    text = content.decode("utf-8-sig", errors="replace").strip("\ufeff \t\r\n")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text[:15].upper().startswith("BEGIN:VCALENDAR"):
        start = text.split("\n", 1)[0][:_MAX_SHOWN]
        raise CalendarError(f"it is no calendar: it begins with {start!r}")
    if not text.upper().endswith("END:VCALENDAR"):
        raise CalendarError("it is cut off: it does not end with END:VCALENDAR")
    tzp.use(_Zones())  # also drops the zones of an earlier calendar
    try:
        calendars: list[Any] = _Parser(text, ComponentFactory(), TypesFactory()).parse()
    except Exception as error:  # library code on untrusted text
        raise CalendarError(f"it cannot be read ({error})") from error
    if not calendars:
        raise CalendarError("it is cut off: not every part of it ends")
    scale = _text(calendars[0], "CALSCALE")
    if scale.upper() not in ("", "GREGORIAN"):
        raise CalendarError(f"its days are not Gregorian, but {scale[:_MAX_SHOWN]!r}")
    return calendars


def _values(component: Any, name: str) -> list[Any]:
    value = component.get(name, [])
    return value if isinstance(value, list) else [value]


def _text(component: Any, name: str) -> str:
    return str(next(iter(_values(component, name)), ""))


def _name(event: Any) -> str:
    """Return the subject of a sentence about an event."""
    text = " ".join(_text(event, "SUMMARY").split())
    short = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    start = next(iter(_values(event, "DTSTART")), None)
    day = ""
    if isinstance(start, vBroken):
        day = re.sub(r"^(\d{4})(\d\d)(\d\d)$", r"\1-\2-\3", str(start)[:8])
    elif start is not None and isinstance(start.dt, date):
        day = f"{date(start.dt.year, start.dt.month, start.dt.day)}"
    return f"The event {short!r} of {day}" if day else f"The event {short!r}"


def _checked_dates(event: Any) -> list[Any]:
    """Return every date of an event.

    Raise an `_EventError` for errors that libraries report badly or never.
    """
    if "EXRULE" in event:
        raise _EventError("has an EXRULE, which is no longer part of the format: use EXDATE")
    if "DTSTART" not in event:
        raise _EventError("has no start")
    for name in _SINGLE:
        if len(_values(event, name)) > 1:
            raise _EventError(f"has more than one {name}")
    dates = _dates(event)
    _check_rules(event)
    if not isinstance(event.get("SEQUENCE"), int):
        event["SEQUENCE"] = 0
    if _is_cancelled(event):
        return dates
    if "DTEND" not in event and isinstance(event.get("DURATION"), vBroken):
        raise _EventError("has a DURATION that is not valid")
    if not {"DTEND", "DURATION"} & event.keys() and isinstance(event["DTSTART"].dt, datetime):
        raise _EventError("has no end")
    try:
        event["DTEND"] = vDDDTypes(recurring_ical_events.EventAdapter(event).raw_end)
    except OverflowError as error:
        raise _EventError("lasts beyond the year 9999") from error
    return [*dates, event["DTEND"]]


def _dates(event: Any) -> list[Any]:
    """Return the dates of an event except its end; raise `_EventError` if one is invalid."""
    dates: list[Any] = []
    for name in _DATES:
        for value in _values(event, name):
            if isinstance(value, vBroken):
                raise _EventError(f"has a {name} that is no date: {str(value)[:_MAX_SHOWN]!r}")
            entries = getattr(value, "dts", [value])
            moment, zone = entries[0].dt, value.params.get("TZID")
            if zone and isinstance(moment, datetime) and moment.tzinfo is None:
                raise _EventError(
                    f"is in the time zone {str(zone)[:_MAX_SHOWN]!r}, which is not known"
                )
            if name != "EXDATE" or isinstance(moment, datetime):
                # An EXDATE of a day stays a day: it excludes all starts in that day.
                dates += entries
    return dates


def _check_rules(event: Any) -> None:
    """Raise `_EventError` for a recurrence rule that cannot be followed."""
    for rule in _values(event, "RRULE"):
        if isinstance(rule, vBroken):
            raise _EventError(f"has a rule that is not valid: {str(rule)[:_MAX_SHOWN]!r}")
        if unknown := sorted(rule.keys() - _RULE_PARTS):
            raise _EventError(f"has a rule with {unknown[0]}, which is not supported")
        if not rule.get("FREQ"):
            raise _EventError("has a rule without a FREQ")
        if any(number < 1 for number in rule.get("INTERVAL", ())):
            raise _EventError("has a rule whose INTERVAL is not a positive number")


def _is_cancelled(event: Any) -> bool:
    return _text(event, "STATUS").upper() == "CANCELLED"


def _occurrences(
    uid: str,
    components: Sequence[Any],
    day_zone: tzinfo,
    period: tuple[datetime, datetime],
    problems: list[str],
) -> list[Occurrence]:
    """Return the occurrences of the events of one UID; days and floating times are in `day_zone`.

    The library gets naive times in the zone of the series. With aware times, it compares times of different
    zones wrongly, and UNTIL in the wrong zone.
    """
    readable = []
    for component in components:
        try:
            readable.append((component, _checked_dates(component)))
        except _EventError as error:
            problems.append(f"{_name(component)} {error}.")
    masters = [event for event, _ in readable if "RECURRENCE-ID" not in event]
    master = max(
        masters, key=lambda event: event["SEQUENCE"], default=readable[0][0] if readable else None
    )
    if master is None or (masters and _is_cancelled(master)):
        return []
    zone = getattr(master["DTSTART"].dt, "tzinfo", None) or day_zone

    def wall(moment: Any) -> Any:
        if isinstance(moment, timedelta):  # the duration of a period
            return moment
        if not isinstance(moment, datetime):
            moment = datetime.combine(moment, time())
        aware = moment if moment.tzinfo else moment.replace(tzinfo=day_zone)
        return aware.astimezone(zone).replace(tzinfo=None)

    def utc(moment: datetime) -> datetime:
        return moment.replace(tzinfo=zone).astimezone(timezone.utc)

    events = _adapters(uid, readable, wall, utc, problems)
    if not events:
        return []
    occurrences = []
    since, until = period
    series = recurring_ical_events.Series(list(events))
    # The margin covers differences between wall clocks; below, absolute times decide.
    for repetition in series.between(wall(since) - _MARGIN, wall(until) + _MARGIN):
        event, start, end = events[repetition._adapter], utc(repetition.start), utc(repetition.end)
        if event is not None and start < end and start < until and since < end:
            occurrences.append(Occurrence(event, start, end))
    return occurrences


def _adapters(
    uid: str,
    readable: Sequence[tuple[Any, list[Any]]],
    wall: Callable[[Any], Any],
    utc: Callable[[datetime], datetime],
    problems: list[str],
) -> dict[Any, CalendarEvent | None]:
    """Return the library's adapters of events, in naive times, with their texts; None if cancelled."""
    events: dict[Any, CalendarEvent | None] = {}
    for event, dates in readable:
        for value in dates:
            value.dt = tuple(map(wall, value.dt)) if isinstance(value.dt, tuple) else wall(value.dt)
        for rule in _values(event, "RRULE"):
            if "UNTIL" in rule:
                rule["UNTIL"] = [_last_moment(moment, wall) for moment in rule["UNTIL"]]
        adapter = recurring_ical_events.EventAdapter(event)
        if _is_cancelled(event):
            events[adapter] = None
        elif utc(adapter.raw_start) < utc(adapter.raw_end):
            summary, description = _text(event, "SUMMARY").strip(), _text(event, "DESCRIPTION")
            events[adapter] = CalendarEvent(uid, summary, description, _name(event))
        else:
            problems.append(f"{_name(event)} ends when or before it starts.")
    return events


def _last_moment(until: date, wall: Callable[[datetime], datetime]) -> datetime:
    """Return the last moment of a rule; an UNTIL that is a day includes the whole day."""
    if isinstance(until, datetime):
        return wall(until) if until.tzinfo else until
    return datetime.combine(until, time(23, 59, 59))


@contextmanager
def _cpu_time(limit_s: float) -> Iterator[None]:
    """Raise `_CpuTimeError` once the context has taken `limit_s` of CPU time."""
    before = signal.signal(signal.SIGPROF, _interrupt)
    try:
        # Repeated, because an exception that a signal raises in a destructor is lost.
        signal.setitimer(signal.ITIMER_PROF, limit_s, 0.1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise _CpuTimeError


if __name__ == "__main__":
    main()
