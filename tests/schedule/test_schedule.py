from __future__ import annotations

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from ndif.schedule.schedule import Schedule
from ndif.schema.deployment import DeploymentConfig
from tests.schedule.calendars import (
    APPLE,
    BERLIN,
    GOOGLE,
    NEW_YORK,
    NOW,
    OUTLOOK,
    UTC,
    calendar,
    event,
    once,
    read,
    spans,
    starts,
)

# Calendars of common programs


def test_google_calendar_is_read() -> None:
    schedule = read(GOOGLE, now=NOW)
    assert schedule.problems == ()
    local = [
        f"{start.astimezone(NEW_YORK):%m-%d %H:%M}-{end.astimezone(NEW_YORK):%H:%M}"
        for start, end in spans(schedule, "openai-community/gpt2")
    ]
    assert local[:6] == [
        "10-05 09:00-11:30",
        "10-07 09:00-11:30",
        "10-12 09:00-11:30",
        "10-20 14:00-15:00",  # moved; and the 14th is an exception
        "10-21 09:00-11:30",
        "10-26 09:00-11:30",
    ]
    assert "11-25 09:00-11:30" not in local
    assert local[-1] == "12-14 09:00-11:30"
    (window,) = schedule.dedicated_at(datetime(2026, 11, 4, 9, 0, tzinfo=NEW_YORK))
    assert window.config == DeploymentConfig(
        "openai-community/gpt2",
        "openai-community/gpt2",
        dtype="bfloat16",
        replicas=2,
        padding_bytes=1024**3,
        dedicated=True,
    )
    assert window.end == datetime(2026, 11, 4, 11, 30, tzinfo=NEW_YORK)


def test_all_day_events_use_time_zone_of_google_calendar() -> None:
    schedule = read(GOOGLE, now=NOW, zone=BERLIN)
    (window,) = schedule.dedicated_at(datetime(2026, 12, 30, tzinfo=NEW_YORK))
    assert (window.config.repo_id, window.event) == ("EleutherAI/pythia-70m",) * 2
    assert window.start == datetime(2026, 12, 30, tzinfo=NEW_YORK)
    assert window.end == datetime(2027, 1, 1, tzinfo=NEW_YORK)
    assert not schedule.dedicated_at(window.end)


def test_prose_in_description_is_ignored() -> None:
    (window,) = read(GOOGLE, now=NOW).dedicated_at(datetime(2026, 12, 24, 17, 30, tzinfo=UTC))
    assert window.config == DeploymentConfig(*["meta-llama/Llama-3.1-8B"] * 2, dedicated=True)


def test_outlook_calendar_is_read() -> None:
    schedule = read(OUTLOOK, now=NOW)
    assert schedule.problems == ()
    daily = [start.astimezone(BERLIN) for start, _ in spans(schedule, "EleutherAI/pythia-70m")]
    assert {(start.hour, start.minute) for start in daily} == {(9, 0)}
    assert {start.weekday() for start in daily} == {0, 1, 2, 3, 4}
    assert (daily[0].date().isoformat(), daily[-1].date().isoformat()) == (
        "2026-10-19",
        "2026-11-13",
    )
    # The calendar defines an unknown time zone; its clocks change on 1 November.
    custom = [start.isoformat() for start, _ in spans(schedule, "openai-community/gpt2")]
    assert custom == [
        "2026-10-30T16:00:00+00:00",
        "2026-11-06T17:00:00+00:00",
        "2026-11-13T17:00:00+00:00",
    ]


def test_apple_calendar_is_read() -> None:
    assert starts(APPLE) == ["10-15 20:00", "10-22 20:00", "11-06 10:00"]


@pytest.mark.parametrize("text", [GOOGLE, OUTLOOK, APPLE], ids=["google", "outlook", "apple"])
def test_line_ends_and_byte_order_mark_are_ignored(text: str) -> None:
    whole = read(text, now=NOW)
    assert read(text.replace("\r\n", "\n"), now=NOW) == whole
    assert read("\ufeff" + text, now=NOW) == whole
    assert read(text.replace("\r\n", "\r"), now=NOW) == whole


# Days and zones


@pytest.mark.parametrize("zone", [UTC, BERLIN, NEW_YORK, ZoneInfo("Pacific/Kiritimati")])
def test_whole_days_and_floating_times_use_time_zone_of_server(zone: ZoneInfo) -> None:
    text = calendar(
        event("DTSTART;VALUE=DATE:20261005", uid="day", summary="org/day"),
        event("DTSTART:20261005T090000", "DTEND:20261005T100000", summary="org/floating"),
    )
    schedule = read(text, now=NOW, zone=zone)
    day = datetime(2026, 10, 5, tzinfo=zone)
    assert spans(schedule, "org/day") == [(day, day + timedelta(days=1))]
    hour = timedelta(hours=1)
    assert spans(schedule, "org/floating") == [(day + 9 * hour, day + 10 * hour)]


def test_consecutive_days_are_one_window() -> None:
    text = calendar(event("DTSTART;VALUE=DATE:20261023", "RRULE:FREQ=DAILY;COUNT=4"))
    schedule = read(text, now=NOW, zone=BERLIN)
    (window,) = schedule.dedicated_at(datetime(2026, 10, 24, tzinfo=BERLIN))
    assert window.end == datetime(2026, 10, 27, tzinfo=BERLIN)
    assert (window.end - window.start) == timedelta(hours=97)  # clocks went back


def test_all_day_series_applies_exception_and_move() -> None:
    text = calendar(
        event(
            "DTSTART;VALUE=DATE:20261005",
            "DTEND;VALUE=DATE:20261006",
            "RRULE:FREQ=WEEKLY;UNTIL=20261026",
            "EXDATE;VALUE=DATE:20261012",
        ),
        event(
            "RECURRENCE-ID;VALUE=DATE:20261019",
            "DTSTART;TZID=Europe/Berlin:20261020T100000",
            "DTEND;TZID=Europe/Berlin:20261020T110000",
        ),
    )
    assert starts(text, zone=BERLIN) == ["10-05 02:00", "10-20 10:00", "10-26 01:00"]


@pytest.mark.filterwarnings("ignore:Timezone")  # pytest does not know what ndif silences
@pytest.mark.parametrize(
    "name", ["Europe/Berlin", "W. Europe Standard Time", "/freeassociation.net/Europe/Berlin"]
)
def test_known_time_zone_needs_no_definition(name: str) -> None:
    text = event(f"DTSTART;TZID={name}:20261005T090000", f"DTEND;TZID={name}:20261005T100000")
    assert starts(calendar(text)) == ["10-05 09:00"]


def test_time_zone_definitions_do_not_leak_between_calendars() -> None:
    def zone(offset: str) -> str:
        return "\r\n".join(
            [
                *("BEGIN:VTIMEZONE", "TZID:Here", "BEGIN:STANDARD", "DTSTART:19700101T000000"),
                *(f"TZOFFSETFROM:{offset}", f"TZOFFSETTO:{offset}"),
                *("END:STANDARD", "END:VTIMEZONE"),
            ]
        )

    event_here = event("DTSTART;TZID=Here:20261005T090000", "DTEND;TZID=Here:20261005T100000")
    assert starts(calendar(zone("+0500"), event_here), zone=UTC) == ["10-05 04:00"]
    assert starts(calendar(zone("+0300"), event_here), zone=UTC) == ["10-05 06:00"]
    assert starts(calendar(event_here, zone("-0300")), zone=UTC) == ["10-05 12:00"]
    (problem,) = read(calendar(event_here), now=NOW).problems
    assert problem == (
        "The event 'org/model' of 2026-10-05 is in the time zone 'Here', which is not known."
    )


# Questions


def test_next_change_is_next_start_or_end() -> None:
    schedule = read(
        calendar(once(), once(uid="two", summary="org/two").replace("T10", "T11")), now=NOW
    )
    nine = datetime(2026, 10, 5, 9, tzinfo=BERLIN)
    hour = timedelta(hours=1)
    assert schedule.next_change(NOW) == nine
    assert schedule.next_change(nine) == nine + hour
    assert schedule.next_change(nine + hour) == nine + 2 * hour
    assert schedule.next_change(nine + 2 * hour) is None
    assert Schedule().next_change(NOW) is None
    assert Schedule().dedicated_at(NOW) == ()


def test_event_that_began_long_ago_is_still_active() -> None:
    text = calendar(event("DTSTART;VALUE=DATE:20200101", "DTEND;VALUE=DATE:20300101"))
    (window,) = read(text, now=NOW).dedicated_at(NOW)
    assert (window.start.year, window.end.year) == (2020, 2030)
