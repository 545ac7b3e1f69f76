"""Time zones that a calendar defines for itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from datetime import datetime

import icalendar
from icalendar.prop import vRecur
from icalendar.timezone import tzp

from ndif.cluster.calendar.content import properties
from ndif.cluster.calendar.recurrence import firings

_MOST_ZONES = 50
_LONGEST = 20_000
_LONGEST_RULE = 200
_USUAL = {"FREQ", "INTERVAL", "BYDAY", "BYMONTH", "BYMONTHDAY", "UNTIL", "COUNT", "WKST"}

# What it prints of "/vendor/Europe/Berlin" is nothing that an operator could act on.
warnings.filterwarnings("ignore", message="Timezone .* is a globally unique TZID")


def learn(zones: Sequence[Sequence[str]]) -> None:
    """Have the library know these zones, and none that an earlier calendar defined.

    It keeps them in one place for the whole process, so nobody else may read a calendar meanwhile.
    """
    tzp.use_zoneinfo()
    for zone in zones[:_MOST_ZONES]:
        _learn_zone(zone)


def _learn_zone(block: Sequence[str]) -> None:
    """Have the library know a zone that the text defines and nobody else does.

    A zone that is not learned is reported with the events that are in it.
    """
    name = properties(block).get("TZID", "")
    if not name or sum(map(len, block)) > _LONGEST or _known_zone(name):
        return
    for line in block:
        if line[:5].upper() == "RRULE" and not _is_harmless(line.partition(":")[2]):
            return
    with contextlib.suppress(Exception):  # others' code on anybody's text
        icalendar.Timezone.from_ical("\r\n".join(block))


def _known_zone(name: str) -> bool:
    try:
        return tzp.timezone(name) is not None
    except (OSError, ValueError):  # "America" is a folder of zones
        return False


def _is_harmless(rule: str) -> bool:
    """Whether following the rule takes no longer than a zone's rule should, which is once a year."""
    parts = dict(part.partition("=")[::2] for part in rule.upper().strip(";").split(";"))
    usual = (
        parts.get("FREQ") == "YEARLY"
        and parts.get("INTERVAL", "1") == "1"
        and parts.keys() <= _USUAL
        and not any("," in value for name, value in parts.items() if name != "BYMONTHDAY")
        and len(rule) < _LONGEST_RULE
    )
    if not usual:
        return False
    try:
        fired = firings(vRecur.from_ical(rule), datetime(1970, 1, 1), datetime(1972, 1, 1), 1)
    except ValueError:
        return False
    return not fired.barren
