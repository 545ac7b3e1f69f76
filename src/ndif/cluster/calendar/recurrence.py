"""When a recurrence rule fires, looked at no longer than a bound, whatever the rule is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import MAXYEAR, date, datetime, time, timedelta
from itertools import islice

from dateutil.rrule import rrulestr

Rule = Mapping[str, Sequence[object]]
"""A rule's parts by their names: FREQ, BYDAY, …"""

_BY = ("DAY", "HOUR", "MINUTE", "MONTH", "MONTHDAY", "SECOND", "SETPOS", "WEEKNO", "YEARDAY")
_CALENDAR_PARTS = frozenset(f"BY{each}" for each in _BY)
_PARTS = frozenset({"FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST"} | _CALENDAR_PARTS)
_TIMES = ("BYHOUR", "BYMINUTE", "BYSECOND")
_SHORT = frozenset({"HOURLY", "MINUTELY", "SECONDLY"})
_LONG = frozenset({"DAILY", "WEEKLY", "MONTHLY", "YEARLY"})

_MOST_VALUES = 400
"""Of all BY parts together; every day of a year fits."""

_MOST_POSITIONS = 31
_MOST_TIMES = 24 * 60

_PERIOD_YEARS = 400
_PERIOD = timedelta(days=146_097)
"""After 400 years the Gregorian calendar repeats, days of the week included."""


class RuleError(ValueError):
    """A rule that is not followed; the message says why, as the rest of a sentence about it."""


@dataclass(frozen=True, slots=True)
class Firings:
    """The times of a rule, in order."""

    times: tuple[datetime, ...]
    complete: bool
    """False: there may be more after the last, but the bound was reached."""
    barren: bool
    """Whether the rule never fires at all, like one for 30 February."""
    days: int
    """How many days had to be looked through."""


def firings(rule: Rule, start: datetime, end: datetime, most: int) -> Firings:
    """The times at which `rule` fires from `start` to before `end`, but at most the first `most`.

    All times are naive: of the clock on the wall where the event is, which is what rules are about.
    UNTIL must be naive too.

    Raises:
        RuleError: if the rule cannot be followed, or could cost more than its bound.
    """
    parts = {str(name).upper(): list(values) for name, values in rule.items()}
    _refuse_costly(parts)
    last = last_of(parts)
    bound = end if last is None else min(end, last + timedelta(microseconds=1))
    times = _times(parts, start, end)
    count = _whole(parts, "COUNT")
    if count is not None and count >= 0:  # some programs mean "for ever" by -1
        times = islice(times, min(count, most + 1))
    found: list[datetime] = []
    seen: datetime | None = None
    complete = True
    for seen in times:
        if seen >= bound:
            break
        if len(found) == most:
            complete = False
            break
        found.append(seen)
    days = _PERIOD.days if seen is None else (seen - start).days
    return Firings(tuple(found), complete, barren=seen is None and count != 0, days=days)


def last_of(rule: Rule) -> datetime | None:
    """The time after which the rule fires no more (UNTIL).

    Raises:
        RuleError: if it is no time.
    """
    match list(rule.get("UNTIL", ())):
        case []:
            return None
        case [datetime() as moment]:
            return moment
        case [date() as day]:  # all of that day
            return datetime.combine(day, time.max)
    raise RuleError("has a rule whose UNTIL is not a date")


def _times(parts: Rule, start: datetime, end: datetime) -> Iterator[datetime]:
    """Every time of the rule, in order.

    A rule that never fires, like 30 February, is followed by dateutil up to the year 9999, and an
    UNTIL does not stop it. That takes many seconds, so the world's end is brought nearer: to less
    than 400 years after `end`.
    """
    text = ";".join(
        f"{name}={','.join(map(str, values))}"
        for name, values in parts.items()
        if name not in ("COUNT", "UNTIL")
    )
    shift = max(0, (MAXYEAR - 1 - end.year) // _PERIOD_YEARS) * _PERIOD
    try:
        rule = iter(rrulestr(text, dtstart=start + shift))
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        raise RuleError(f"has a rule that is not valid ({error})") from error
    while True:
        try:
            moment = next(rule)
        except (StopIteration, ValueError, OverflowError):
            return  # it went past the year 9999, which it says now and then in the wrong words
        yield moment - shift


def _refuse_costly(parts: Rule) -> None:
    """Let nothing pass on which dateutil could work for long before the first time comes."""
    if unknown := sorted(parts.keys() - _PARTS):
        raise RuleError(f"has a rule with {unknown[0]}, which is not supported")
    frequency = ",".join(map(str, parts.get("FREQ", ())))
    if frequency not in _SHORT | _LONG:
        raise RuleError("has a rule without a FREQ")
    interval = _whole(parts, "INTERVAL")
    if interval is not None and interval < 1:  # at 0, dateutil never ends
        raise RuleError("has a rule whose INTERVAL is not a positive number")
    used = sorted(parts.keys() & _CALENDAR_PARTS)
    if frequency in _SHORT and used:
        raise RuleError(
            f"has a rule that repeats {frequency} and only {used[0]}, which is not supported: "
            "let it repeat daily"
        )
    times = 1
    for name in _TIMES:
        times *= len(set(map(str, parts.get(name, ())))) or 1
    if (
        sum(len(parts[name]) for name in used) > _MOST_VALUES
        or len(parts.get("BYSETPOS", ())) > _MOST_POSITIONS
        or times > _MOST_TIMES
    ):
        raise RuleError("has a rule with too many values")


def _whole(parts: Rule, name: str) -> int | None:
    match list(parts.get(name, ())):
        case []:
            return None
        case [int(number)]:
            return number
    raise RuleError(f"has a rule whose {name} is not a number")
