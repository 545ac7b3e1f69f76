from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from ndif.schedule.expansion import CalendarError, Expansion, ExpansionLimits
from tests.fuzzing import dice, examples
from tests.schedule.calendars import (
    APPLE,
    GOOGLE,
    NOW,
    OUTLOOK,
    calendar,
    event,
    once,
    read,
    spans,
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", autouse=True)
def _garbage_collection_takes_no_time() -> Iterator[None]:
    """A collection takes a third of a second, which the limits would count as a series'."""
    gc.freeze()
    yield
    gc.unfreeze()


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
def test_no_recurrence_rule_hangs(rule: str) -> None:
    text = calendar(once(f"RRULE:{rule}"), once(uid="good", summary="org/good"))
    began = time.process_time()
    schedule = read(text, now=NOW, limits=ExpansionLimits(series_cpu_s=0.1))
    assert time.process_time() - began < 3
    assert len(schedule.problems) <= 1
    # A rule within the limits has few occurrences.
    assert len(spans(schedule, "org/model")) <= 2
    for problem in schedule.problems:
        assert problem.startswith("The event 'org/model' of 2026-10-05 ")
    assert len(spans(schedule, "org/good")) == 1


@pytest.mark.parametrize(
    ("rule", "too_often"), [("SECONDLY", True), ("MINUTELY", True), ("HOURLY", False)]
)
def test_rule_that_repeats_too_often_is_reported(rule: str, too_often: bool) -> None:
    limits = ExpansionLimits(series_cpu_s=0.8 if too_often else 30)
    problems = read(calendar(once(f"RRULE:FREQ={rule}")), now=NOW, limits=limits).problems
    sentence = "The event 'org/model' of 2026-10-05 repeats too often to be followed."
    assert problems == ((sentence,) if too_often else ())


def test_old_series_is_expanded() -> None:
    old = once("RRULE:FREQ=HOURLY;INTERVAL=2", uid="a", summary="org/a").replace("2026", "2001")
    older = once("RRULE:FREQ=DAILY", uid="b", summary="org/b").replace("2026", "1901")
    schedule = read(
        calendar(old, older), now=NOW, limits=ExpansionLimits(series_cpu_s=60, all_cpu_s=60)
    )
    assert schedule.problems == ()
    assert len(spans(schedule, "org/a")) in range(430 * 12, 431 * 12)
    assert len(spans(schedule, "org/b")) == 431


def test_calendar_with_many_rules_does_not_hang() -> None:
    minutely = [once("RRULE:FREQ=MINUTELY", uid=f"{n}", summary=f"org/{n}") for n in range(300)]
    limits = ExpansionLimits(series_cpu_s=0.2, all_cpu_s=0.9)
    began = time.process_time()
    schedule = read(calendar(*minutely), now=NOW, limits=limits)
    assert time.process_time() - began < 5
    assert schedule.problems[-1].startswith("The calendar repeats too much: ")
    assert len(schedule.problems) <= 101


def test_events_beyond_occurrence_limit_are_skipped() -> None:
    daily = [once("RRULE:FREQ=DAILY", uid=f"{n}", summary=f"org/{n}") for n in range(5)]
    schedule = read(calendar(*daily), now=NOW, limits=ExpansionLimits(occurrences=900))
    assert schedule.problems == ("The calendar repeats too much: 2 of its events are skipped.",)
    assert len(schedule.timelines) == 3


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
def test_time_zone_with_hostile_rule_does_not_affect_other_event(rule: str) -> None:
    zone = "\r\n".join(
        [
            *("BEGIN:VTIMEZONE", "TZID:Slow", "BEGIN:STANDARD", "DTSTART:16010101T000000"),
            *(f"RRULE:{rule}", "TZOFFSETFROM:+0100", "TZOFFSETTO:+0200"),
            *("END:STANDARD", "END:VTIMEZONE"),
        ]
    )
    slow = event("DTSTART;TZID=Slow:20261005T090000", "DTEND;TZID=Slow:20261005T100000", uid="s")
    text = calendar(zone, slow, once(uid="good", summary="org/good"))
    began = time.process_time()
    schedule = read(text, now=NOW, limits=ExpansionLimits(series_cpu_s=0.3))
    assert time.process_time() - began < 3
    assert len(schedule.problems) <= 2
    assert len(spans(schedule, "org/good")) == 1


def run(setup: str, text: str) -> subprocess.CompletedProcess[bytes]:
    """Expand a calendar in a process, after some code that changes its module `e`."""
    return subprocess.run(
        [
            *(sys.executable, "-c", f"import ndif.schedule.expansion as e; {setup}; e.main()"),
            *("UTC", str(NOW), str(NOW + timedelta(days=400))),
        ],
        input=text.encode(),
        capture_output=True,
    )


def test_expansion_memory_is_limited() -> None:
    greedy = "e.expand = lambda *_: bytes(e.MEMORY_BYTES)"
    process = run(greedy, calendar())
    assert process.returncode == 1
    assert b"MemoryError" in process.stderr


def test_kernel_limits_cpu_time_of_expansion() -> None:
    endless = "e.CPU_S = 1; e.expand = lambda *_: [None for _ in iter(int, 1)]"
    process = run(endless, calendar())
    assert process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)


def test_event_with_too_many_dates_is_skipped() -> None:
    dates = ",".join(f"{NOW + timedelta(minutes=n):%Y%m%dT%H%M%SZ}" for n in range(100_000))
    hostile = once(f"RDATE:{dates}")
    few = (
        "from functools import partial; e.expand = partial(e.expand, limits=e.ExpansionLimits(0.3))"
    )
    process = run(few, calendar(hostile, once(uid="good", summary="org/good")))
    expansion = Expansion.from_json(process.stdout)
    assert [occurrence.event.uid for occurrence in expansion.occurrences] == ["good"]
    assert len(expansion.problems) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is no calendar: it begins with ''"),
        ("<!doctype html>\n<html>", "it is no calendar: it begins with '<!doctype html>'"),
        (GOOGLE[:1500], "it is cut off: it does not end with END:VCALENDAR"),
        (calendar(head="CALSCALE:HEBREW"), "its days are not Gregorian, but 'HEBREW'"),
    ],
)
def test_invalid_calendar_is_rejected(text: str, why: str) -> None:
    with pytest.raises(CalendarError) as caught:
        read(text, now=NOW)
    assert str(caught.value) == why


@pytest.mark.hypothesis
def test_damaged_calendar_raises_only_calendar_error() -> None:
    chance = dice()
    read_at_all, count = 0, examples(1)
    for _ in range(count):
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
    assert read_at_all > count / 2
