"""Templates of alert mails."""

from __future__ import annotations

from string import Template

NAMES = ("headline", "details", "advice", "server", "event", "severity", "time")
"""Names that a template may use after a `$`."""
_SUBJECT = "Subject: "


def split_template(template: str) -> tuple[str, str]:
    """Return the subject and the text of a mail template; raise a ValueError if it is invalid."""
    first, _, text = template.replace("\r\n", "\n").partition("\n")
    if not first.startswith(_SUBJECT) or not text.startswith("\n") or not text.strip():
        raise ValueError("the file must begin with a line `Subject: …` and an empty line")
    try:
        Template(f"{first}\n{text}").substitute(dict.fromkeys(NAMES, ""))
    except KeyError as error:
        allowed = ", ".join(f"${name}" for name in NAMES)
        raise ValueError(f"the file has ${error.args[0]}; allowed are {allowed}") from error
    except ValueError as error:
        raise ValueError("the file has a single $; write $$") from error
    return first.removeprefix(_SUBJECT), text[1:]
