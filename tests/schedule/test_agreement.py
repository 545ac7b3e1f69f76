from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import icalendar
import recurring_ical_events
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzzing import examples
from tests.schedule.calendars import (
    BERLIN,
    NEW_YORK,
    NOW,
    UTC,
    YEAR,
    calendar,
    event,
    read,
    spans,
)

MINUTES = st.integers(-3 * 24 * 60, 10 * 24 * 60)
RULES = st.sampled_from(
    ["", "FREQ=DAILY", "FREQ=DAILY;INTERVAL=3", "FREQ=WEEKLY;BYDAY=MO,TU", "FREQ=HOURLY;INTERVAL=5"]
)


@st.composite
def calendars(draw: st.DrawFn) -> str:
    events = []
    for number in range(draw(st.integers(1, 6))):
        start = NOW + timedelta(minutes=draw(MINUTES))
        zone = draw(st.sampled_from([BERLIN, NEW_YORK]))
        local = start.astimezone(zone).replace(tzinfo=None)
        rule = draw(RULES)
        until = (local + timedelta(days=8)).strftime("%Y%m%dT%H%M%S")
        events.append(
            event(
                f"DTSTART;TZID={zone.key}:{local:%Y%m%dT%H%M%S}",
                f"DURATION:PT{draw(st.integers(1, 3000))}M",
                f"DESCRIPTION:replicas: {draw(st.integers(1, 3))}",
                *([f"RRULE:{rule};UNTIL={until}"] if rule else []),
                uid=f"{number}",
                summary=draw(st.sampled_from(["org/a", "org/b"])),
            )
        )
    return calendar(*events)


@settings(max_examples=examples(0.5))
@given(calendars(), st.lists(MINUTES, min_size=1, max_size=20))
def test_dedicated_at_and_next_change_agree_with_windows(text: str, minutes: list[int]) -> None:
    schedule = read(text, now=NOW)
    windows = schedule.windows(*YEAR)
    for timeline in schedule.timelines:
        assert all(window.start < window.end for window in timeline)
        for window, other in pairwise(timeline):
            assert window.end <= other.start
            assert window.end < other.start or window.config != other.config
    for moment in [
        *(NOW + timedelta(minutes=minute) for minute in minutes),
        *(window.start for window in windows[:5]),
        *(window.end for window in windows[:5]),
    ]:
        dedicated = schedule.dedicated_at(moment)
        assert dedicated == tuple(
            window for window in windows if window.start <= moment < window.end
        )
        change = schedule.next_change(moment)
        later = [edge for window in windows for edge in (window.start, window.end) if edge > moment]
        assert change == min(later, default=None)
        if change is not None:
            assert schedule.dedicated_at(change - timedelta(microseconds=1)) == dedicated
            assert schedule.dedicated_at(change) != dedicated


@settings(max_examples=examples(0.2))
@given(calendars(), MINUTES)
def test_schedule_does_not_depend_on_time_of_reading(text: str, minutes: int) -> None:
    moment = NOW + timedelta(minutes=minutes)
    schedules = [read(text, now=NOW + timedelta(days=days)) for days in (-300, 0, 20)]
    assert len({schedule.dedicated_at(moment) for schedule in schedules}) == 1


@st.composite
def rules(draw: st.DrawFn) -> str:
    parts = [f"FREQ={draw(st.sampled_from(['DAILY', 'WEEKLY', 'MONTHLY', 'YEARLY']))}"]
    if draw(st.booleans()):
        parts.append(f"INTERVAL={draw(st.integers(1, 4))}")
    for name, values in (
        ("BYDAY", ["MO", "MO,WE,FR", "SU"]),
        ("BYMONTH", ["10", "1,11", "2,3,4"]),
        ("BYMONTHDAY", ["1", "-1", "5,29,31"]),
        # Not 14: where an exception is at 9 in New York, the library drops that hour, too, because it
        # takes 14 in UTC for 14 on the clock.
        ("BYHOUR", ["2", "9,16"]),
        ("BYSETPOS", ["1", "-1"]),
    ):
        if draw(st.integers(0, 3)) == 0:
            parts.append(f"{name}={draw(st.sampled_from(values))}")
    ends = ["", "COUNT=1", "COUNT=7", "UNTIL=20261120T080000Z", "UNTIL=20270401T065959Z"]
    end = draw(st.sampled_from(ends))
    return ";".join([*parts, end] if end else parts)


@settings(max_examples=examples(0.5))
@given(rules(), st.integers(-800, 100), st.sampled_from(["Europe/Berlin", "America/New_York"]))
def test_recurrence_rules_agree_with_library(rule: str, days: int, zone: str) -> None:
    """The project expands these rules itself, as the library has no bounds; the results must agree."""
    day = f"{NOW + timedelta(days=days):%Y%m%d}"
    text = calendar(
        event(
            f"DTSTART;TZID={zone}:{day}T090000",
            f"DTEND;TZID={zone}:{day}T093000",
            f"RRULE:{rule}",
            f"EXDATE;TZID={zone}:20261012T090000,20261101T090000",
        )
    )
    events = recurring_ical_events.of(icalendar.Calendar.from_ical(text)).between(*YEAR)
    expected = sorted(vevent["DTSTART"].dt.astimezone(UTC) for vevent in events)
    assert [start for start, _ in spans(read(text, now=NOW))] == expected
