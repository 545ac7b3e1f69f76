"""The lines of an iCalendar text, and the components they make (RFC 5545, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SHOWN = 80
"""How much of what a calendar says is repeated in a sentence."""

MOST_LINES = 5_000
"""Of one event or zone."""


class CalendarError(ValueError):
    """The text is no calendar; the message says why."""


def unfolded(text: str) -> list[str]:
    """The content lines, after a look whether they are a whole calendar's."""
    text = text.lstrip("\ufeff \t\r\n").replace("\r\n", "\n").replace("\r", "\n")
    if not text[:15].upper().startswith("BEGIN:VCALENDAR"):
        start = text.split("\n", 1)[0][:SHOWN]
        raise CalendarError(f"it is no calendar: it begins with {start!r}")
    lines = text.replace("\n ", "").replace("\n\t", "").rstrip().split("\n")
    if lines[-1].strip().upper() != "END:VCALENDAR":
        raise CalendarError("it is cut off: it does not end with END:VCALENDAR")
    return [line for line in lines if line.strip()]


def blocks(lines: Sequence[str], name: str) -> Iterator[list[str]]:
    """The lines of every component `name`, its BEGIN and END included."""
    begin, end = f"BEGIN:{name}", f"END:{name}"
    block: list[str] | None = None
    for line in lines:
        mark = line[:20].rstrip().upper()
        if mark == begin:
            block = []
        if block is not None:
            block.append(line)
            if mark == end:
                yield block
                block = None


def properties(block: Sequence[str]) -> dict[str, str]:
    """What stands in the component itself, as it stands there, by the properties' names."""
    found: dict[str, str] = {}
    depth = 0
    for line in block:
        head, _, value = line.partition(":")
        name = head.partition(";")[0].strip().upper()
        if name == "BEGIN":
            depth += 1
        elif name == "END":
            depth -= 1
        elif depth == 1:
            found.setdefault(name, value.strip())
    return found
