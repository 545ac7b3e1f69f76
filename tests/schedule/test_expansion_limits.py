from __future__ import annotations

import random

import pytest

from ndif.cluster.calendar.content import CalendarError
from ndif.cluster.schedule import read
from tests.cluster.calendars import (
    APPLE,
    GOOGLE,
    NOW,
    OUTLOOK,
    calendar,
    event,
    once,
    spans,
)


@pytest.mark.parametrize(
    "rule",
    [
        "FREQ=SECONDLY",
        "FREQ=SECONDLY;UNTIL=21260101T000000Z",
        "FREQ=SECONDLY;COUNT=2147483647",
        "FREQ=MINUTELY",
        "FREQ=SECONDLY;BYHOUR=3;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=SECONDLY;BYSETPOS=5",
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30;COUNT=5",
        "FREQ=WEEKLY;BYMONTH=2;BYMONTHDAY=30;UNTIL=20270101T000000Z",
        "FREQ=MONTHLY;BYDAY=MO;BYSETPOS=300",
        "FREQ=DAILY;BYHOUR=" + ",".join(map(str, range(24))) + ";BYMINUTE=" + ",".join(
            map(str, range(60))) + ";BYSECOND=" + ",".join(map(str, range(60))),
        "FREQ=YEARLY;BYYEARDAY=" + ",".join(["1"] * 20_000),
    ],
)  # fmt: skip
def test_no_rule_hangs(rule: str) -> None:
    schedule = read(calendar(once(f"RRULE:{rule}"), once(uid="good", summary="org/good")), now=NOW)
    (problem,) = schedule.problems
    assert problem.startswith("The event 'org/model' of 2026-10-05 ")
    assert len(spans(schedule, "org/good")) == 1


@pytest.mark.parametrize(
    ("rule", "until"),
    [
        ("FREQ=SECONDLY", "2026-10-05 12:19"),
        ("FREQ=MINUTELY", "2026-10-13 16:59"),
        ("FREQ=HOURLY", None),
    ],
)
def test_how_far_a_rule_is_followed_is_said(rule: str, until: str | None) -> None:
    problems = read(calendar(once(f"RRULE:{rule}")), now=NOW).problems
    said = f"The event 'org/model' of 2026-10-05 repeats too often, and is looked at only up to {until}."
    assert problems == ((said,) if until else ())


def test_a_series_that_began_long_ago_is_followed_as_far() -> None:
    old = once("RRULE:FREQ=HOURLY", uid="a").replace("2026", "2001")
    older = once("RRULE:FREQ=DAILY", uid="b").replace("2026", "1901")
    schedule = read(calendar(old, older), now=NOW)
    (problem,) = schedule.problems
    assert problem.endswith(
        "of 2001-10-05 repeats too often, and is looked at only up to 2007-06-19 16:00."
    )
    assert len(spans(schedule)) == 431


def test_a_calendar_full_of_rules_does_not_hang() -> None:
    secondly = [once("RRULE:FREQ=MINUTELY", uid=f"{n}", summary=f"org/{n}") for n in range(300)]
    schedule = read(calendar(*secondly), now=NOW)
    assert any("repeats too much" in problem for problem in schedule.problems)
    assert len(schedule.problems) <= 101


@pytest.mark.parametrize(
    "rule",
    [
        "FREQ=SECONDLY",
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=YEARLY;INTERVAL=0",
        "FREQ=YEARLY;BYHOUR=1,2,3",
        "FREQ=YEARLY;BYDAY=XX",
    ],
)
def test_a_zone_with_a_hostile_rule_is_not_learned(rule: str) -> None:
    zone = "\r\n".join(
        [
            *("BEGIN:VTIMEZONE", "TZID:Slow", "BEGIN:STANDARD", "DTSTART:16010101T000000"),
            *(f"RRULE:{rule}", "TZOFFSETFROM:+0100", "TZOFFSETTO:+0200"),
            *("END:STANDARD", "END:VTIMEZONE"),
        ]
    )
    slow = event("DTSTART;TZID=Slow:20261005T090000", "DTEND;TZID=Slow:20261005T100000")
    (problem,) = read(calendar(zone, slow), now=NOW).problems
    assert "'Slow', which is not known" in problem


def test_too_many_events_are_refused() -> None:
    with pytest.raises(CalendarError, match=r"it holds 20,001 events, and at most 20,000 are read"):
        read(calendar(*["BEGIN:VEVENT\r\nEND:VEVENT"] * 20_001), now=NOW)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is no calendar: it begins with ''"),
        ("<!doctype html>\n<html>", "it is no calendar: it begins with '<!doctype html>'"),
        (GOOGLE[:1500], "it is cut off: it does not end with END:VCALENDAR"),
        (calendar(head="CALSCALE:HEBREW"), "its days are not Gregorian, but 'HEBREW'"),
    ],
)
def test_what_is_no_calendar_is_refused(text: str, why: str) -> None:
    with pytest.raises(CalendarError) as caught:
        read(text, now=NOW)
    assert str(caught.value) == why


def test_damage_never_raises_anything_else() -> None:
    chance = random.Random(4)
    read_at_all = 0
    for _ in range(150):
        text = list(chance.choice([GOOGLE, OUTLOOK, APPLE]))
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(text))
            text[at] = chance.choice(
                ["", "\0", ";", ":", ",", "\\", "=", "9", "\udcff", "\r\n", "-"]
            )
        try:
            schedule = read("".join(text), now=NOW)
        except CalendarError:
            continue
        read_at_all += 1
        assert all(len(problem) < 1000 for problem in schedule.problems)
    assert read_at_all > 100
