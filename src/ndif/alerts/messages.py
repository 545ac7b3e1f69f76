"""Messages about incidents, and their bodies for Slack, Discord, programs and mailboxes.

Pure. Model names and error texts are untrusted: no form interprets them as markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from string import Template
from typing import Final

from ndif.alerts.incidents import Incident, IncidentEvent, Member, Notice
from ndif.config.mail_template import split_template
from ndif.config.units import format_duration
from ndif.delivery.mail import new_mail
from ndif.schema.alerts import AlertCause, AlertIncident, Severity
from ndif.schema.answer import JsonObject, to_plain
from ndif.schema.server_state import ProblemKind as Kind

CRITICAL: Final = "critical"
WARNING: Final = "warning"
INFO: Final = "info"

_MAX_LISTED = 20
"""Maximum causes that one message lists."""
_SLACK_HEADER, _SLACK_TEXT = 150, 3000
"""Maximum characters of a header and a section block (docs.slack.dev/reference/block-kit/blocks)."""
_DISCORD_TITLE, _DISCORD_TEXT = 256, 4096
"""Maximum characters of an embed's title and description; all embeds of a message may have 6000."""
_SUBJECT = 200
"""Maximum characters of a mail's subject, far below the 998 of a line."""
_COLOURS = {CRITICAL: 0xCC2936, WARNING: 0xE0A100, INFO: 0x2E8B57}
_MARKS = {CRITICAL: "🔴", WARNING: "🟠", INFO: "🟢"}

# Bold, lists, links and quotes of Discord's Markdown.
_DISCORD_MARKS = re.compile(r"([\\*_~`|>\[\]()#-])")
_SLACK_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line break, line separators, directional marks, lone surrogates."""

DEFAULT_TEMPLATE = """\
Subject: $headline

$headline

$details

$advice

Server: $server
Time:   $time
"""


@dataclass(frozen=True, slots=True)
class About:
    """The wording for a kind of causes."""

    title: str
    severity: Severity
    advice: str
    """Sentence with the operator's first step."""


ABOUT = {
    Kind.STORE_AWAY: About(
        "A store does not answer",
        CRITICAL,
        "Check the service and the network; `ndif logs` shows the reason.",
    ),
    Kind.NODE_LOST: About(
        "A node is gone",
        CRITICAL,
        "Check the node and its network, and join the node again. The alert ends after a day without it.",
    ),
    Kind.GPU_WITHDRAWN: About(
        "A GPU takes no models",
        WARNING,
        "Run `nvidia-smi` and `dmesg` on its node; if the GPU fails again, reset or replace the card.",
    ),
    Kind.DISK: About(
        "The disk of results is nearly full",
        CRITICAL,
        "Delete other files on it, run `ndif gc`, or set NDIF_RESULT_TTL_S and NDIF_MAX_STORED_BYTES.",
    ),
    Kind.NO_REPLICA: About(
        "A model has no replica",
        CRITICAL,
        "Check `ndif status`, and `ndif deploy` the model again, or `ndif evict` another model.",
    ),
    Kind.UNHEALTHY: About(
        "A replica does not answer",
        WARNING,
        "The server replaces it; else run `ndif evict MODEL --replica ID --cold`, and check its node.",
    ),
    Kind.LOAD_FAILED: About(
        "A model could not be loaded",
        CRITICAL,
        "Check its name, its files and the memory (`ndif status`), and `ndif deploy` it again.",
    ),
    Kind.REPLICAS_LOST: About(
        "The processes of a model keep ending",
        WARNING,
        "`ndif logs` shows how they ended; check `dmesg` for memory, `nvidia-smi -q -d ECC` for a GPU.",
    ),
    Kind.PROBE: About(
        "The server's own traces fail",
        CRITICAL,
        "`ndif probe MODEL` sends another. If the value is wrong, compare the files and `ndif restart`.",
    ),
    Kind.QUEUE_STUCK: About(
        "Jobs wait and none is dispatched",
        CRITICAL,
        "Check `ndif status` and `ndif queue`; `ndif evict` frees memory, and `ndif kill` ends a job.",
    ),
    Kind.ERROR_RATE: About(
        "Many jobs of a model fail",
        WARNING,
        "Check with `ndif usage` whether all users are affected. Run a trace, or `ndif restart MODEL`.",
    ),
    Kind.EVICTIONS: About(
        "Models evict each other",
        WARNING,
        "Set NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS, deploy important models as dedicated, or add GPUs.",
    ),
    Kind.PROBLEM: About("The server has a problem", WARNING, "`ndif status` shows it."),
}

_WORDS = {
    IncidentEvent.OPENED: "",
    IncidentEvent.CHANGED: "Changed: ",
    IncidentEvent.REPEATED: "Still: ",
    IncidentEvent.RESOLVED: "Resolved: ",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A message to the operator, not yet in the form of a destination."""

    event: str
    """An `IncidentEvent`, `digest` or `test`."""
    severity: str
    at: float
    server: str
    headline: str
    lines: tuple[str, ...]
    advice: str = ""
    incident: AlertIncident | None = None

    @property
    def text(self) -> str:
        """Return the whole message as plain text."""
        parts = (self.headline, *self.lines, self.advice)
        return "\n".join(part for part in parts if part)


def about(notice: Notice, server: str, now: float) -> Message:
    """Return the message about an incident."""
    incident = notice.incident
    kind = ABOUT[incident.kind]
    is_over = notice.event is IncidentEvent.RESOLVED
    headline = f"{_WORDS[notice.event]}{kind.title}"
    subjects = list(dict.fromkeys(member.cause.subject for member in incident.members))
    if incident.kind is not Kind.PROBLEM:
        headline += f": {subjects[0]}" + (f" and {len(subjects) - 1} more" if subjects[1:] else "")
    return Message(
        notice.event.value,
        INFO if is_over else kind.severity,
        now,
        server,
        _plain(headline).replace("\n", " "),
        tuple(_lines(incident, now)),
        "" if is_over else kind.advice,
        described(incident),
    )


def test_message(server: str, now: float) -> Message:
    """Return the message of `ndif alerts test`."""
    headline = "Test: alerts of this server arrive here"
    return Message("test", INFO, now, server, headline, ("`ndif alerts test` has sent this.",))


def digest_message(server: str, now: float, lines: Sequence[str]) -> Message:
    """Return the daily digest."""
    return Message("digest", INFO, now, server, "The last day", tuple(lines))


def described(incident: Incident) -> AlertIncident:
    """Return an incident as the API and `ndif alerts list` show it."""
    causes = [
        AlertCause(
            kind=member.cause.kind.value,
            subject=member.cause.subject,
            sentence=member.cause.sentence,
            since=member.cause.since,
            over=member.over,
        )
        for member in incident.members
    ]
    return AlertIncident(
        id=incident.id,
        kind=incident.kind.value,
        severity=ABOUT[incident.kind].severity,
        opened=incident.opened,
        resolved=incident.resolved,
        causes=causes,
    )


def _lines(incident: Incident, now: float) -> list[str]:
    """Return a line for each cause: holding causes first, and of these the incident's own kind first."""
    ranked = sorted(
        incident.members,
        key=lambda member: (member.over is not None, member.cause.kind is not incident.kind),
    )
    lines = [_line(member, now, is_resolved=incident.resolved is not None) for member in ranked]
    if len(lines) > _MAX_LISTED:
        left = len(lines) - _MAX_LISTED
        lines[_MAX_LISTED:] = [f"… and {left} more: `ndif alerts list` shows all."]
    if incident.resolved is not None:
        lines.append(f"It took {lasted(incident.resolved - incident.opened)}.")
    return lines


def _line(member: Member, now: float, *, is_resolved: bool) -> str:
    cause = member.cause
    sentence = _plain(cause.sentence).replace("\n", " ")
    if member.over is None:
        return f"• {sentence} (for {lasted(now - cause.since)})"
    was = "" if is_resolved else "over: "
    return f"• {was}{sentence} (for {lasted(member.over - cause.since)})"


def lasted(seconds: float) -> str:
    """Return a duration in words, to the second."""
    return format_duration(max(0, round(seconds)))


def _plain(text: str) -> str:
    return _CONTROL.sub(" ", text)


# Forms


def slack(message: Message) -> JsonObject:
    """Return the body for an incoming webhook of Slack."""
    headline = f"{_MARKS[message.severity]} {message.headline}"
    body = "\n".join(filter(None, (*message.lines, message.advice, f"Server: {message.server}")))
    return {
        "text": _escaped(headline, _for_slack, _SLACK_TEXT),
        "blocks": [
            {
                "type": "header",
                "text": {"type": "plain_text", "text": _cut(headline, _SLACK_HEADER)},
            },
            {
                "type": "section",
                # Without `verbatim` Slack turns text that resembles an address or a channel into links.
                "text": {
                    "type": "mrkdwn",
                    "text": _escaped(body, _for_slack, _SLACK_TEXT),
                    "verbatim": True,
                },
            },
        ],
    }


def discord(message: Message) -> JsonObject:
    """Return the body for a webhook of Discord."""
    body = "\n".join(filter(None, (*message.lines, message.advice)))
    return {
        "embeds": [
            {
                "title": _escaped(message.headline, _for_discord, _DISCORD_TITLE),
                "description": _escaped(body, _for_discord, _DISCORD_TEXT),
                "color": _COLOURS[message.severity],
                "footer": {"text": _cut(f"Server: {message.server}", _DISCORD_TITLE)},
            }
        ],
        "allowed_mentions": {"parse": []},
    }


def plain_json(message: Message) -> JsonObject:
    """Return the body for any other webhook; docs/monitoring.md lists its fields."""
    body: JsonObject = to_plain(message)
    del body["lines"], body["advice"]
    return {**body, "text": message.text}


def mail(message: Message, template: str, recipient: str, sender: str, now: float) -> EmailMessage:
    """Return the mail; `template` is a line `Subject: …`, an empty line, and the text."""
    values = {
        "headline": message.headline,
        "details": "\n".join(message.lines),
        "advice": message.advice,
        "server": message.server,
        "event": message.event,
        "severity": message.severity,
        "time": formatdate(message.at, usegmt=True),
    }
    # Split before values are filled in, so that no value becomes a header.
    subject, text = split_template(template)
    filled = " ".join(Template(subject).substitute(values).split())
    incident = message.incident.id if message.incident else "none"
    name = f"ndif-{message.event}-{incident}-{message.at:.0f}"
    text = re.sub(r"\n{3,}", "\n\n", Template(text).substitute(values)).strip() + "\n"
    return new_mail(sender, recipient, _cut(_plain(filled), _SUBJECT), name, text, now)


def _cut(text: str, most: int) -> str:
    return _escaped(text, str, most)


def _for_slack(text: str) -> str:
    return "".join(_SLACK_ENTITIES.get(character, character) for character in text)


def _for_discord(text: str) -> str:
    return _DISCORD_MARKS.sub(r"\\\1", text)


def _escaped(text: str, escape: Callable[[str], str], most: int) -> str:
    """Escape the text and cut it to at most `most` characters, never within an escape."""
    if _length(escaped := escape(text)) <= most:
        return escaped
    pieces: list[str] = []
    left = most - 1
    for character in text:
        piece = escape(character)
        if (left := left - _length(piece)) < 0:
            break
        pieces.append(piece)
    return "".join(pieces) + "…"


def _length(text: str) -> int:
    """Return the number of UTF-16 code units, two for an emoji."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
