from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from tests.schedule.calendars import (
    NOW,
    UTC,
    YEAR,
    calendar,
    event,
    once,
    read,
    spans,
    starts,
)


def test_weekly_event_keeps_local_hour_across_clock_change() -> None:
    text = calendar(
        event(
            "DTSTART;TZID=America/New_York:20261027T080000",
            "DTEND;TZID=America/New_York:20261027T090000",
            "RRULE:FREQ=WEEKLY;COUNT=3",
            uid="ny",
            summary="org/ny",
        ),
        event(
            "DTSTART;TZID=Europe/Berlin:20261020T080000",
            "DTEND;TZID=Europe/Berlin:20261020T090000",
            "RRULE:FREQ=WEEKLY;COUNT=3",
            uid="berlin",
            summary="org/berlin",
        ),
    )
    schedule = read(text, now=NOW)
    assert [f"{start:%m-%d %H}" for start, _ in spans(schedule, "org/ny")] == [
        "10-27 12",
        "11-03 13",  # from 1 November on
        "11-10 13",
    ]
    assert [f"{start:%m-%d %H}" for start, _ in spans(schedule, "org/berlin")] == [
        "10-20 06",
        "10-27 07",  # from 25 October on
        "11-03 07",
    ]


@pytest.mark.parametrize(
    ("zone", "start", "hours"),
    [("America/New_York", "20261031", 11), ("Europe/Berlin", "20261024", 11)],
)
def test_event_is_longer_in_night_when_clocks_go_back(zone: str, start: str, hours: int) -> None:
    lines = (f"DTSTART;TZID={zone}:{start}T220000", "DURATION:PT10H", "RRULE:FREQ=DAILY;COUNT=3")
    times = spans(read(calendar(event(*lines)), now=NOW))
    assert [(end - begin) // timedelta(hours=1) for begin, end in times] == [hours, 10, 10]


def test_event_in_skipped_hour_keeps_its_remaining_time() -> None:
    text = calendar(
        event(
            "DTSTART;TZID=Europe/Berlin:20270327T023000",
            "DTEND;TZID=Europe/Berlin:20270327T040000",
            "RRULE:FREQ=DAILY;COUNT=3",
        )
    )
    assert [f"{a:%d %H:%M}-{b:%H:%M}" for a, b in spans(read(text, now=NOW))] == [
        "27 01:30-03:00",
        "28 01:30-02:00",
        "29 00:30-02:00",
    ]


@pytest.mark.parametrize(
    ("rule", "days"),
    [
        ("FREQ=DAILY;COUNT=3", ["05", "06", "07"]),
        ("FREQ=DAILY;INTERVAL=2;COUNT=3", ["05", "07", "09"]),
        ("FREQ=DAILY;UNTIL=20261007", ["05", "06", "07"]),
        ("FREQ=DAILY;UNTIL=20261007T070000Z", ["05", "06", "07"]),
        ("FREQ=DAILY;UNTIL=20261007T065959Z", ["05", "06"]),
        ("FREQ=DAILY;UNTIL=20261007T090000", ["05", "06", "07"]),
        ("UNTIL=20261007T070000Z;FREQ=DAILY", ["05", "06", "07"]),
        ("FREQ=WEEKLY;BYDAY=MO,FR;COUNT=4", ["05", "09", "12", "16"]),
        ("FREQ=MONTHLY;BYDAY=1MO;COUNT=1", ["05"]),
        ("FREQ=DAILY;COUNT=2;WKST=MO;", ["05", "06"]),
        ("FREQ=DAILY;UNTIL=20261004T000000Z", []),
        ("FREQ=DAILY;COUNT=2147483647;UNTIL=20261006", ["05", "06"]),
    ],
)
def test_count_and_until_end_series(rule: str, days: list[str]) -> None:
    assert starts(calendar(once(f"RRULE:{rule}"))) == [f"10-{day} 09:00" for day in days]


def test_rule_without_end_continues() -> None:
    schedule = read(calendar(once("RRULE:FREQ=YEARLY")), now=NOW)
    assert [start.year for start, _ in spans(schedule)] == [2026, 2027]
    later = read(calendar(once("RRULE:FREQ=YEARLY")), now=NOW + timedelta(days=365 * 30))
    assert later.next_change(NOW + timedelta(days=365 * 30)) == datetime(2056, 10, 5, 7, tzinfo=UTC)


@pytest.mark.parametrize(
    "line",
    [
        "EXDATE;TZID=Europe/Berlin:20261006T090000",
        "EXDATE:20261006T070000Z",
        "EXDATE;TZID=America/New_York:20261006T030000",
        "EXDATE;VALUE=DATE:20261006",
    ],
)
def test_exception_date_removes_occurrence(line: str) -> None:
    assert starts(calendar(once("RRULE:FREQ=DAILY;COUNT=3", line))) == [
        "10-05 09:00",
        "10-07 09:00",
    ]


def test_several_exceptions_and_additional_dates_are_applied() -> None:
    text = once(
        "RRULE:FREQ=DAILY;COUNT=4",
        "EXDATE;TZID=Europe/Berlin:20261005T090000,20261007T090000",
        "RDATE;TZID=Europe/Berlin:20261020T120000",
        "RDATE;VALUE=PERIOD:20261021T120000Z/PT3H",
    )
    assert starts(calendar(text)) == ["10-06 09:00", "10-08 09:00", "10-20 12:00", "10-21 14:00"]
    begin, end = spans(read(calendar(text), now=NOW))[-1]
    assert end - begin == timedelta(hours=3)  # a period has its own length


def test_moved_occurrence_replaces_original() -> None:
    moved = event(
        "RECURRENCE-ID;TZID=Europe/Berlin:20261006T090000",
        "DTSTART;TZID=America/New_York:20261009T140000",
        "DTEND;TZID=America/New_York:20261009T150000",
    )
    text = calendar(once("RRULE:FREQ=DAILY;COUNT=3"), moved)
    assert starts(text) == ["10-05 09:00", "10-07 09:00", "10-09 20:00"]
    # A change refers to the time that it replaces, in any time zone.
    assert starts(
        text.replace(
            "RECURRENCE-ID;TZID=Europe/Berlin:20261006T090000", "RECURRENCE-ID:20261006T070000Z"
        )
    ) == starts(text)


def test_change_of_this_and_future_occurrences_is_applied() -> None:
    changed = event(
        "RECURRENCE-ID;RANGE=THISANDFUTURE;TZID=Europe/Berlin:20261007T090000",
        "DTSTART;TZID=Europe/Berlin:20261007T150000",
        "DTEND;TZID=Europe/Berlin:20261007T170000",
    )
    text = calendar(once("RRULE:FREQ=DAILY;COUNT=5"), changed)
    assert starts(text) == [
        *("10-05 09:00", "10-06 09:00"),
        *("10-07 15:00", "10-08 15:00", "10-09 15:00"),
    ]


def test_changes_of_old_series_are_applied() -> None:
    old = once("RRULE:FREQ=DAILY").replace("20261005", "20100101")
    moved = event(
        "RECURRENCE-ID;TZID=Europe/Berlin:20261006T090000",
        "DTSTART;TZID=Europe/Berlin:20261006T120000",
        "DTEND;TZID=Europe/Berlin:20261006T130000",
    )
    assert "10-06 12:00" in starts(calendar(old, moved))
    assert starts(calendar(old)).count("10-06 09:00") == 2  # of two years
    assert starts(calendar(old, moved)).count("10-06 09:00") == 1
    onwards = moved.replace("RECURRENCE-ID", "RECURRENCE-ID;RANGE=THISANDFUTURE")
    onwards = onwards.replace(":20261006T09", ":20120101T09").replace("20261006", "20120103")
    times = starts(calendar(old, onwards))
    assert times
    assert {start[-5:] for start in times} == {"12:00"}
    # The occurrence moves from after the period into it.
    early = moved.replace("20261006T09", "20300101T09")
    assert "10-06 12:00" in starts(calendar(old, early))


def test_changed_occurrence_can_name_another_model() -> None:
    changed = event(
        "RECURRENCE-ID;TZID=Europe/Berlin:20261006T090000",
        "DTSTART;TZID=Europe/Berlin:20261006T090000",
        "DTEND;TZID=Europe/Berlin:20261006T100000",
        summary="org/other",
    )
    schedule = read(calendar(once("RRULE:FREQ=DAILY;COUNT=3"), changed), now=NOW)
    assert [window.config.repo_id for window in schedule.windows(*YEAR)] == [
        *("org/model", "org/other", "org/model")
    ]


def test_cancelled_events_and_occurrences_are_ignored() -> None:
    daily = once("RRULE:FREQ=DAILY;COUNT=3")
    without_one = event(
        "RECURRENCE-ID;TZID=Europe/Berlin:20261006T090000",
        "DTSTART;TZID=Europe/Berlin:20261006T090000",
        "STATUS:CANCELLED",
        summary="whatever",
    )
    assert starts(calendar(daily, without_one)) == ["10-05 09:00", "10-07 09:00"]
    assert starts(calendar(once("RRULE:FREQ=DAILY", "STATUS:CANCELLED"))) == []
    moved = without_one.replace("STATUS:CANCELLED", "DTEND:20261006T120000Z")
    assert starts(calendar(once("RRULE:FREQ=DAILY", "STATUS:CANCELLED"), moved)) == []
    assert starts(calendar(once("STATUS:TENTATIVE"))) == ["10-05 09:00"]


def test_later_version_of_event_wins() -> None:
    newer = once("SEQUENCE:3").replace("T09", "T12").replace("T10", "T13")
    for text in (calendar(once("SEQUENCE:2"), newer), calendar(newer, once("SEQUENCE:2"))):
        assert starts(text) == ["10-05 12:00"]
