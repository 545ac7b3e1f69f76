"""Bodies of messages: they respect the limits of each form and escape foreign text."""

from __future__ import annotations

import json
import re
from email import message_from_bytes
from email.policy import default as policy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ndif.alerts.causes import Cause
from ndif.alerts.incidents import Incident, IncidentEvent, Member, Notice
from ndif.alerts.messages import (
    DEFAULT_TEMPLATE,
    Message,
    about,
    discord,
    mail,
    plain_json,
    slack,
)
from ndif.config.mail_template import NAMES, split_template
from ndif.config.settings import Settings
from ndif.errors import problems
from ndif.schema.server_state import ProblemKind as Kind

NOW = 1_800_000_000.0
TEXTS = st.text(st.characters(), max_size=400) | st.sampled_from(
    [
        "<!channel> &<https://evil.example|here>",
        "@everyone <@1>",
        "a\r\nBcc: eve@example.org",
        "🔴" * 300,
    ]
)


def notice(
    *sentences: str,
    event: IncidentEvent = IncidentEvent.OPENED,
    subject: str = "org/a",
    kind: Kind = Kind.LOAD_FAILED,
) -> Notice:
    members = tuple(
        Member(Cause(kind, f"{subject}{number or ''}", sentence, NOW - 90), NOW)
        for number, sentence in enumerate(sentences)
    )
    resolved = NOW if event is IncidentEvent.RESOLVED else None
    return Notice(event, Incident("1f3a", kind, NOW - 60, members, NOW, frozenset(), resolved))


def message(*sentences: str, **options: Any) -> Message:
    return about(notice(*sentences, **options), "ndif.example.org", NOW)


def units(text: str) -> int:
    """Count characters as JavaScript and the services do (UTF-16 units)."""
    return len(text.encode("utf-16-le")) // 2


def within_the_limits_of_slack(body: dict[str, Any]) -> None:
    assert body.keys() == {"text", "blocks"}
    assert 0 < units(body["text"]) <= 4000
    header, section = body["blocks"]
    assert (header["type"], header["text"]["type"]) == ("header", "plain_text")
    assert 0 < units(header["text"]["text"]) <= 150
    assert (section["type"], section["text"]["type"]) == ("section", "mrkdwn")
    assert 0 < units(section["text"]["text"]) <= 3000
    for text in (body["text"], section["text"]["text"]):
        assert not re.search(r"[<>]|&(?!amp;|lt;|gt;)", text)


def within_the_limits_of_discord(body: dict[str, Any]) -> None:
    (embed,) = body["embeds"]
    assert body["allowed_mentions"] == {"parse": []}
    assert 0 < units(embed["title"]) <= 256
    assert 0 < units(embed["description"]) <= 4096
    assert units(embed["title"] + embed["description"] + embed["footer"]["text"]) <= 6000
    # Every Markdown character is escaped.
    bare = re.sub(r"\\[\\*_~`|>\[\]()#-]", "", embed["title"] + embed["description"])
    assert not re.search(r"[\\*_~`|>\[\]()#-]", bare)


def of_the_schema(body: dict[str, Any]) -> None:
    assert body.keys() == {
        *("event", "severity", "at", "server", "headline", "text", "incident"),
    }
    assert json.loads(json.dumps(body)) == body
    incident = body["incident"]
    if incident is not None:
        assert incident.keys() == {"id", "kind", "severity", "opened", "resolved", "causes"}
        for cause in incident["causes"]:
            assert cause.keys() == {"kind", "subject", "sentence", "since", "over"}


@given(
    st.lists(TEXTS, min_size=1, max_size=40),
    TEXTS,
    st.sampled_from(IncidentEvent),
    st.sampled_from(Kind),
)
def test_every_body_is_within_limits_of_its_form(
    sentences: list[str], subject: str, event: IncidentEvent, kind: Kind
) -> None:
    about_cause = message(*sentences, subject=subject, event=event, kind=kind)
    within_the_limits_of_slack(slack(about_cause))
    within_the_limits_of_discord(discord(about_cause))
    of_the_schema(plain_json(about_cause))
    sent = mail(about_cause, DEFAULT_TEMPLATE, "ops@example.org", "ndif@example.org", NOW)
    read = message_from_bytes(sent.as_bytes(), policy=policy)
    assert {*read.keys()} == {*sent.keys()}
    assert (read["To"], read["From"]) == ("ops@example.org", "ndif@example.org")
    assert not re.search(r"[\r\n]", str(read["Subject"]))


def test_alert_states_causes_durations_and_advice() -> None:
    about_cause = message("org/a has no files.", "org/a1 has none, too.")
    assert about_cause.headline == "A model could not be loaded: org/a and 1 more"
    assert about_cause.text.splitlines() == [
        about_cause.headline,
        "• org/a has no files. (for 1m 30s)",
        "• org/a1 has none, too. (for 1m 30s)",
        "Check its name, its files and the memory (`ndif status`), and `ndif deploy` it again.",
    ]
    over = message("org/a has no files.", event=IncidentEvent.RESOLVED)
    assert over.headline == "Resolved: A model could not be loaded: org/a"
    assert (over.severity, over.advice, over.lines[-1]) == ("info", "", "It took 1m.")


def test_long_list_of_causes_is_cut_and_counted() -> None:
    lines = message(*(f"{number} fails." for number in range(30))).lines
    assert len(lines) == 21
    assert lines[-1] == "… and 10 more: `ndif alerts list` shows all."


def test_mentions_and_markup_in_foreign_text_are_escaped() -> None:
    text = "<!channel> @everyone [here](https://evil.example) \u202e\x00 & so on"
    about_cause = message(text)
    (_, section) = slack(about_cause)["blocks"]
    assert "&lt;!channel&gt;" in section["text"]["text"]
    assert section["text"]["verbatim"] is True
    assert r"\[here\]\(https" in discord(about_cause)["embeds"][0]["description"]
    assert not {"\u202e", "\x00"} & {*about_cause.text}


def test_line_break_in_subject_injects_no_header() -> None:
    about_cause = message("x", subject="a\r\nBcc: eve@example.org")
    sent = mail(
        about_cause, "Subject: [ndif] $headline\n\n$details", "ops@example.org", "n@x.org", NOW
    )
    assert str(sent["Subject"]).startswith("[ndif] A model could not be loaded: a")
    assert sent["Bcc"] is None


def test_operator_template_fills_every_placeholder() -> None:
    template = "Subject: $severity $event\n\n" + " | ".join(f"${name}" for name in NAMES)
    about_cause = message("costs $5.")
    sent = mail(about_cause, template, "ops@example.org", "ndif@example.org", NOW)
    assert sent["Subject"] == "critical opened"
    assert "costs $5. (for 1m 30s)" in sent.get_content()
    assert "ndif.example.org | opened | critical | Fri, 15 Jan 2027 08:00:00 GMT" in (
        sent.get_content()
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("$details", "must begin with a line"),
        ("Subject: x\nno empty line", "must begin with a line"),
        ("Subject: x\n\n", "must begin with a line"),
        ("Subject: x\n\n$user", r"has \$user; allowed are \$headline"),
        ("Subject: x\n\ncosts 5 $", "single"),
    ],
)
def test_wrong_mail_template_is_rejected_at_start(
    template: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=expected):
        split_template(template)
    file = tmp_path / "mail.txt"
    file.write_text(template)
    mails = {"smtp_url": "smtp://mail.example", "mail_from": "n@x.org", "alert_email": "o@x.org"}
    with pytest.raises(ValidationError, match=expected):
        Settings(alert_email_template=file, **mails)  # type: ignore[arg-type]


MAIL = {"smtp_url": "smtp://mail.example", "mail_from": "n@x.org"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"alert_webhooks": "https://a.example/x, hooks.slack.com/secret"}, "its address 2 is not"),
        ({"alert_webhooks": "teams+https://secret.example"}, "its address 1 is not like"),
        ({"alert_webhooks": "ftp://secret.example"}, "its address 1 is not like"),
        ({"alert_email": "ada", **MAIL}, "'ada' is not an address"),
        ({"alert_email": "ada@example.org"}, "NDIF_ALERT_EMAIL needs NDIF_SMTP_URL"),
        ({"alert_email_template": __file__, **MAIL}, "begin with a line"),
        ({"alert_digest_at": "08:00"}, "NDIF_ALERT_DIGEST_AT needs"),
        (
            {"alert_digest_at": "8 am", "alert_webhooks": "https://x.example"},
            "'8 am' is not a time",
        ),
        ({"alert_digest_at": "24:00", "alert_webhooks": "https://x.example"}, "is not a time"),
        ({"alert_error_rate": "1.5"}, "less than 1"),
    ],
)
def test_wrong_settings_have_clear_errors_without_secrets(
    values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(**values)
    sentence = problems(caught.value)[0].sentence
    assert expected in sentence
    assert "secret" not in sentence


def test_mail_template_without_recipients_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "mail.txt"
    file.write_text(DEFAULT_TEMPLATE)
    with pytest.raises(ValidationError, match="NDIF_ALERT_EMAIL_TEMPLATE needs NDIF_ALERT_EMAIL"):
        Settings(alert_email_template=file)
