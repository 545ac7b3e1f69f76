"""An iCalendar text (RFC 5545) as events, each read on its own so that none can spoil the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import icalendar
from icalendar.prop import vBroken

from ndif.cluster.calendar.content import (
    MOST_LINES,
    SHOWN,
    CalendarError,
    blocks,
    properties,
    unfolded,
)
from ndif.cluster.calendar.recurrence import Rule
from ndif.cluster.calendar.zones import learn

Moment = date | datetime
"""A whole day, or a time: with a zone, or without one where the event floats."""

_NEEDED = frozenset(
    {"UID", "SUMMARY", "DESCRIPTION", "STATUS", "SEQUENCE", "RECURRENCE-ID"}
    | {"DTSTART", "DTEND", "DURATION", "RRULE", "RDATE", "EXRULE", "EXDATE"}
)
"""What is read of an event. The rest may be long, or broken, and does not matter."""

_MOST_EVENTS = 20_000
_LONGEST_LINE = 100_000

_PARSING = threading.Lock()
"""icalendar keeps the zones that texts define in one place for the whole process."""


class EventError(ValueError):
    """An event cannot be read; the message says why, as the rest of a sentence about it."""


@dataclass(frozen=True, slots=True)
class Event:
    """One VEVENT: an event, a series of them, or a change to one of a series."""

    uid: str
    summary: str
    description: str
    start: Moment
    end: Moment
    rules: tuple[Rule, ...] = ()
    extra: tuple[Moment, ...] = ()
    """Further starts (RDATE)."""
    excluded: tuple[Moment, ...] = ()
    replaces: Moment | None = None
    """The occurrence that this one stands for (RECURRENCE-ID)."""
    onwards: bool = False
    """And for all that follow it."""
    cancelled: bool = False
    sequence: int = 0

    @property
    def repeats(self) -> bool:
        """Whether it may happen more than once, or not at all."""
        return bool(self.rules or self.extra or self.excluded)

    @property
    def name(self) -> str:
        """What sentences about it call it."""
        return named(self.summary, f"{self.start:%Y-%m-%d}")


@dataclass(frozen=True, slots=True)
class Events:
    """What a calendar holds."""

    events: tuple[Event, ...]
    zone: tzinfo
    """Where days and floating times are."""
    problems: tuple[str, ...]


def named(summary: str, day: str) -> str:
    """What a sentence calls an event."""
    text = " ".join(summary.split())
    short = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return f"The event {short!r} of {day}" if day else f"The event {short!r}"


def read_events(text: str, zone: tzinfo) -> Events:
    """The events of a calendar.

    Days and floating times are in the zone that the calendar names for itself (X-WR-TIMEZONE),
    or else in `zone`.

    Raises:
        CalendarError: if it is no calendar, or one that was cut off.
    """
    lines = unfolded(text)
    own = properties(lines)
    if own.get("CALSCALE", "").upper() not in ("", "GREGORIAN"):
        raise CalendarError(f"its days are not Gregorian, but {own['CALSCALE'][:SHOWN]!r}")
    found = list(blocks(lines, "VEVENT"))
    if len(found) > _MOST_EVENTS:
        raise CalendarError(
            f"it holds {len(found):,} events, and at most {_MOST_EVENTS:,} are read"
        )
    problems: list[str] = []
    if wanted := own.get("X-WR-TIMEZONE"):
        try:
            zone = ZoneInfo(wanted)
        except (ValueError, OSError, LookupError):
            problems.append(f"The calendar's own time zone, {wanted[:SHOWN]!r}, is not known.")
    events: list[Event] = []
    with _PARSING:
        learn(list(blocks(lines, "VTIMEZONE")))
        for block in found:
            try:
                events.append(_event(block))
            except EventError as error:
                problems.append(f"{_raw_name(block)} {error}.")
            except Exception as error:  # others' code on anybody's text
                problems.append(f"{_raw_name(block)} cannot be read ({error}).")
    return Events(tuple(events), zone, tuple(problems))


def _raw_name(block: Sequence[str]) -> str:
    """What a sentence calls an event that could not be read."""
    raw = properties(block)
    day = raw.get("DTSTART", "")[:8]
    day = f"{day[:4]}-{day[4:6]}-{day[6:]}" if day.isdigit() else day
    return named(raw.get("SUMMARY", "").replace("\\,", ","), day)


def _event(block: Sequence[str]) -> Event:
    if len(block) > MOST_LINES:
        raise EventError(f"has more than {MOST_LINES:,} lines")
    component = _component(block)
    summary, description = (_text(component, name) for name in ("SUMMARY", "DESCRIPTION"))
    cancelled = _text(component, "STATUS").upper() == "CANCELLED"
    if "EXRULE" in component:
        raise EventError("has an EXRULE, which is no longer part of the format: use EXDATE")
    start = _moment(component, "DTSTART")
    if start is None:
        raise EventError("has no start")
    end = start if cancelled else _end(component, start)
    replaces = _moment(component, "RECURRENCE-ID")
    rules = component.get("RRULE") or []
    sequence = component.get("SEQUENCE")
    return Event(
        uid=_text(component, "UID") or f"{summary}\n{start}",
        summary=summary.strip(),
        description=description,
        start=start,
        end=end,
        rules=tuple(_rule(rule) for rule in (rules if isinstance(rules, list) else [rules])),
        extra=_moments(component, "RDATE"),
        excluded=_moments(component, "EXDATE"),
        replaces=replaces,
        onwards=replaces is not None
        and component["RECURRENCE-ID"].params.get("RANGE") == "THISANDFUTURE",
        cancelled=cancelled,
        sequence=sequence if isinstance(sequence, int) else 0,
    )


def _component(block: Sequence[str]) -> Any:
    """The event as the library reads it, less alarms and what is not needed."""
    kept: list[str] = []
    depth = 0
    for line in block:
        name = line[:80].partition(":")[0].partition(";")[0].strip().upper()
        depth += (name == "BEGIN") - (name == "END")
        if (depth == 1 and name in _NEEDED) or line is block[0] or line is block[-1]:
            kept.append(line)
    if any(len(line) > _LONGEST_LINE for line in kept):
        raise EventError(f"has a line of more than {_LONGEST_LINE:,} characters")
    try:
        return icalendar.Event.from_ical("\r\n".join(kept))
    except OSError as error:  # the name is that of a folder of zones, like "America"
        raise EventError("is in a time zone that is not known") from error
    except Exception as error:  # others' code on anybody's text
        raise EventError(f"cannot be read ({error})") from error


def _text(component: Any, name: str) -> str:
    value = component.get(name, "")
    return str(value[0] if isinstance(value, list) else value)


def _moment(component: Any, name: str) -> Moment | None:
    value = component.get(name)
    if value is None:
        return None
    if isinstance(value, list):
        raise EventError(f"has more than one {name}")
    broken = isinstance(value, vBroken)
    return _checked(None if broken else getattr(value, "dt", None), value, name)


def _moments(component: Any, name: str) -> tuple[Moment, ...]:
    values = component.get(name) or []
    found: list[Moment] = []
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, vBroken):
            raise EventError(f"has a {name} that is no date: {str(value)[:SHOWN]!r}")
        for each in value.dts:
            # A period counts from its start; it is as long as the event.
            moment = each.dt[0] if isinstance(each.dt, tuple) else each.dt
            found.append(_checked(moment, value, name))
    return tuple(found)


def _checked(moment: object, value: Any, name: str) -> Moment:
    if not isinstance(moment, date):
        raise EventError(f"has a {name} that is no date: {str(value)[:SHOWN]!r}")
    wanted = value.params.get("TZID")
    if wanted and isinstance(moment, datetime) and moment.tzinfo is None:
        raise EventError(f"is in the time zone {str(wanted)[:SHOWN]!r}, which is not known")
    return moment


def _end(component: Any, start: Moment) -> Moment:
    end = _moment(component, "DTEND")
    if end is not None:
        return end
    length = component.get("DURATION")
    if length is None:
        if isinstance(start, datetime):
            raise EventError("has no end")
        return start + timedelta(days=1)
    lasts = None if isinstance(length, vBroken) else getattr(length, "dt", None)
    if not isinstance(lasts, timedelta):
        raise EventError("has a DURATION that is none")
    try:
        if isinstance(start, datetime) or not lasts.seconds:
            return start + lasts
        return datetime(start.year, start.month, start.day) + lasts
    except OverflowError as error:
        raise EventError("lasts beyond the end of time") from error


def _rule(rule: Any) -> Rule:
    if isinstance(rule, vBroken):
        raise EventError(f"has a rule that is not valid: {str(rule)[:SHOWN]!r}")
    return dict(rule)
