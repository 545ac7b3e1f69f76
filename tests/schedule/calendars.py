"""Calendars in the form of common programs, and short calendars for single features."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from ndif.schedule.expansion import DEFAULT_LIMITS, Expansion, ExpansionLimits, expand
from ndif.schedule.schedule import Schedule, make_schedule
from ndif.schedule.source import AHEAD, BEHIND
from ndif.schema.deployment import DeploymentConfig

UTC = timezone.utc
NEW_YORK = ZoneInfo("America/New_York")
BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 10, 1, tzinfo=UTC)
YEAR = (NOW - timedelta(days=31), NOW + timedelta(days=400))
"""The default period."""

Span = tuple[datetime, datetime]

GOOGLE = """\
BEGIN:VCALENDAR
PRODID:-//Google Inc//Google Calendar 70.9054//EN
VERSION:2.0
CALSCALE:GREGORIAN
METHOD:PUBLISH
X-WR-CALNAME:Dedicated models
X-WR-TIMEZONE:America/New_York
X-WR-CALDESC:Who has which model\\, and when
BEGIN:VTIMEZONE
TZID:America/New_York
X-LIC-LOCATION:America/New_York
BEGIN:DAYLIGHT
TZOFFSETFROM:-0500
TZOFFSETTO:-0400
TZNAME:EDT
DTSTART:19700308T020000
RRULE:FREQ=YEARLY;BYMONTH=3;BYDAY=2SU
END:DAYLIGHT
BEGIN:STANDARD
TZOFFSETFROM:-0400
TZOFFSETTO:-0500
TZNAME:EST
DTSTART:19701101T020000
RRULE:FREQ=YEARLY;BYMONTH=11;BYDAY=1SU
END:STANDARD
END:VTIMEZONE
BEGIN:VEVENT
DTSTART;TZID=America/New_York:20261005T090000
DTEND;TZID=America/New_York:20261005T113000
RRULE:FREQ=WEEKLY;WKST=SU;UNTIL=20261215T045959Z;BYDAY=MO,WE
EXDATE;TZID=America/New_York:20261014T090000
EXDATE;TZID=America/New_York:20261125T090000
DTSTAMP:20261001T120000Z
ORGANIZER;CN=Dedicated models:mailto:c_0a1b2c3d4e5f@group.calendar.google.com
UID:4q1s0b8m7h3k2j5l6n9p0r1t2v@google.com
ATTENDEE;CUTYPE=INDIVIDUAL;ROLE=REQ-PARTICIPANT;PARTSTAT=ACCEPTED;CN=some
 one@example.edu;X-NUM-GUESTS=0:mailto:someone@example.edu
CREATED:20260901T080000Z
DESCRIPTION:replicas: 2<br>dtype: bfloat16<br>padding_bytes:&nbsp\\;1GiB\\n\\n-
 ::~:~::~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~:~::~:~::
 -\\nJoin with Google Meet: https://meet.google.com/abc-defg-hij\\n-::~:~::~:~
 ::-
LAST-MODIFIED:20260930T101112Z
LOCATION:
SEQUENCE:1
STATUS:CONFIRMED
SUMMARY:openai-community/gpt2
TRANSP:OPAQUE
BEGIN:VALARM
ACTION:DISPLAY
DESCRIPTION:This is an event reminder
TRIGGER:-P0DT0H30M0S
END:VALARM
END:VEVENT
BEGIN:VEVENT
DTSTART;TZID=America/New_York:20261020T140000
DTEND;TZID=America/New_York:20261020T150000
DTSTAMP:20261001T120000Z
UID:4q1s0b8m7h3k2j5l6n9p0r1t2v@google.com
RECURRENCE-ID;TZID=America/New_York:20261019T090000
DESCRIPTION:replicas: 2<br>dtype: bfloat16<br>padding_bytes:&nbsp\\;1GiB
SEQUENCE:2
STATUS:CONFIRMED
SUMMARY:openai-community/gpt2
TRANSP:OPAQUE
END:VEVENT
BEGIN:VEVENT
DTSTART:20261224T170000Z
DTEND:20261224T180000Z
DTSTAMP:20261001T120000Z
UID:7jf83hd73hd8@google.com
DESCRIPTION:For Anna's course\\, as agreed: see the wiki.
STATUS:CONFIRMED
SUMMARY:meta-llama/Llama-3.1-8B
END:VEVENT
BEGIN:VEVENT
DTSTART;VALUE=DATE:20261230
DTEND;VALUE=DATE:20270101
DTSTAMP:20261001T120000Z
UID:1111jf83hd73hd8@google.com
STATUS:CONFIRMED
SUMMARY:EleutherAI/pythia-70m
END:VEVENT
END:VCALENDAR
""".replace("\n", "\r\n")

OUTLOOK = """\
BEGIN:VCALENDAR
METHOD:PUBLISH
PRODID:Microsoft Exchange Server 2010
VERSION:2.0
X-WR-CALNAME:Models
BEGIN:VTIMEZONE
TZID:W. Europe Standard Time
BEGIN:STANDARD
DTSTART:16010101T030000
TZOFFSETFROM:+0200
TZOFFSETTO:+0100
RRULE:FREQ=YEARLY;INTERVAL=1;BYDAY=-1SU;BYMONTH=10
END:STANDARD
BEGIN:DAYLIGHT
DTSTART:16010101T020000
TZOFFSETFROM:+0100
TZOFFSETTO:+0200
RRULE:FREQ=YEARLY;INTERVAL=1;BYDAY=-1SU;BYMONTH=3
END:DAYLIGHT
END:VTIMEZONE
BEGIN:VTIMEZONE
TZID:Customized Time Zone
BEGIN:STANDARD
DTSTART:16010101T020000
TZOFFSETFROM:-0400
TZOFFSETTO:-0500
RRULE:FREQ=YEARLY;INTERVAL=1;BYDAY=1SU;BYMONTH=11
END:STANDARD
BEGIN:DAYLIGHT
DTSTART:16010101T020000
TZOFFSETFROM:-0500
TZOFFSETTO:-0400
RRULE:FREQ=YEARLY;INTERVAL=1;BYDAY=2SU;BYMONTH=3
END:DAYLIGHT
END:VTIMEZONE
BEGIN:VEVENT
DESCRIPTION:\\n
RRULE:FREQ=DAILY;UNTIL=20261113T080000Z;INTERVAL=1;BYDAY=MO,TU,WE,TH,FR
UID:040000008200E00074C5B7101A82E00800000000F0
 A1B2C3D4E5D601000000000000000010000000
SUMMARY;LANGUAGE=en-US:EleutherAI/pythia-70m
DTSTART;TZID=W. Europe Standard Time:20261019T090000
DTEND;TZID=W. Europe Standard Time:20261019T170000
CLASS:PUBLIC
PRIORITY:5
DTSTAMP:20261012T074523Z
TRANSP:OPAQUE
STATUS:CONFIRMED
SEQUENCE:0
X-MICROSOFT-CDO-APPT-SEQUENCE:0
X-MICROSOFT-CDO-BUSYSTATUS:BUSY
END:VEVENT
BEGIN:VEVENT
UID:custom
SUMMARY;LANGUAGE=en-US:openai-community/gpt2
DTSTART;TZID=Customized Time Zone:20261030T120000
DTEND;TZID=Customized Time Zone:20261030T130000
RRULE:FREQ=WEEKLY;COUNT=3;INTERVAL=1;BYDAY=FR;WKST=SU
STATUS:CONFIRMED
END:VEVENT
END:VCALENDAR
""".replace("\n", "\r\n")

APPLE = """\
BEGIN:VCALENDAR
VERSION:2.0
PRODID:-//Apple Inc.//macOS 15.1//EN
CALSCALE:GREGORIAN
X-APPLE-CALENDAR-COLOR:#1BADF8
BEGIN:VTIMEZONE
TZID:Europe/Berlin
BEGIN:DAYLIGHT
TZOFFSETFROM:+0100
RRULE:FREQ=YEARLY;BYMONTH=3;BYDAY=-1SU
DTSTART:19810329T020000
TZNAME:MESZ
TZOFFSETTO:+0200
END:DAYLIGHT
BEGIN:STANDARD
TZOFFSETFROM:+0200
RRULE:FREQ=YEARLY;BYMONTH=10;BYDAY=-1SU
DTSTART:19961027T030000
TZNAME:MEZ
TZOFFSETTO:+0100
END:STANDARD
END:VTIMEZONE
BEGIN:VEVENT
CREATED:20261001T081500Z
UID:5E2D0C2B-7C3A-4F0E-9A51-0D7A8D0B9F11
RRULE:FREQ=WEEKLY;INTERVAL=1;UNTIL=20261108T225959Z
EXDATE;TZID=Europe/Berlin:20261029T200000
DTEND;TZID=Europe/Berlin:20261015T220000
TRANSP:OPAQUE
X-APPLE-TRAVEL-ADVISORY-BEHAVIOR:AUTOMATIC
SUMMARY:openai-community/gpt2
LAST-MODIFIED:20261001T081600Z
DTSTAMP:20261001T081600Z
DTSTART;TZID=Europe/Berlin:20261015T200000
SEQUENCE:0
BEGIN:VALARM
X-WR-ALARMUID:3B5E
UID:3B5E
TRIGGER:-PT15M
ATTACH;VALUE=URI:Chord
ACTION:AUDIO
END:VALARM
END:VEVENT
BEGIN:VEVENT
UID:5E2D0C2B-7C3A-4F0E-9A51-0D7A8D0B9F11
RECURRENCE-ID;TZID=Europe/Berlin:20261105T200000
DTSTART;TZID=Europe/Berlin:20261106T100000
DTEND;TZID=Europe/Berlin:20261106T120000
SUMMARY:openai-community/gpt2
SEQUENCE:1
END:VEVENT
END:VCALENDAR
""".replace("\n", "\r\n")


def event(*lines: str, uid: str = "one", summary: str = "org/model") -> str:
    """A VEVENT with these lines."""
    return "\r\n".join(["BEGIN:VEVENT", f"UID:{uid}", f"SUMMARY:{summary}", *lines, "END:VEVENT"])


def calendar(*events: str, head: str = "") -> str:
    """A calendar with these events."""
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//test//EN", head, *events, "END:VCALENDAR"]
    return "\r\n".join(line for line in lines if line) + "\r\n"


def read(
    text: str,
    deployments: Sequence[DeploymentConfig] = (),
    *,
    now: datetime,
    zone: tzinfo = UTC,
    limits: ExpansionLimits = DEFAULT_LIMITS,
) -> Schedule:
    """Return the schedule of a calendar, expanded in this process."""
    content = text.encode(errors="surrogateescape")
    expansion = expand(content, zone, now - BEHIND, now + AHEAD, limits)
    return make_schedule(Expansion.from_json(expansion.to_json()), deployments)


def spans(schedule: Schedule, repo_id: str | None = None) -> list[Span]:
    return [
        (window.start, window.end)
        for window in schedule.windows(*YEAR)
        if repo_id in (None, window.config.repo_id)
    ]


def starts(text: str, zone: ZoneInfo = BERLIN, **options: object) -> list[str]:
    """Return the local start times at which a calendar's only model is dedicated."""
    schedule = read(text, now=NOW, **options)  # type: ignore[arg-type]
    assert schedule.problems == ()
    return [f"{start.astimezone(zone):%m-%d %H:%M}" for start, _ in spans(schedule)]


def once(*lines: str, **options: str) -> str:
    """An event from nine to ten on the 5th."""
    return event(
        "DTSTART;TZID=Europe/Berlin:20261005T090000",
        "DTEND;TZID=Europe/Berlin:20261005T100000",
        *lines,
        **options,
    )
