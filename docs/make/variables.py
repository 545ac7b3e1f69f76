"""The reference of variables, from the settings."""

from __future__ import annotations

from docs.make.text import cell, code

from ndif.config.reference import as_text, variables
from ndif.config.settings import Settings

_HEAD = """\
# Variables

Every variable that a server or a command reads. A size is `12GiB`, `500MB` or a number of bytes; a duration
is `90s`, `15m`, `1h 30m` or a number of seconds. `ndif info --config` shows the values of a running server.

| variable | default | |
| --- | --- | --- |
"""


def page() -> str:
    """Return the page."""
    rows = (
        f"| {code(each.name)} | {code(as_text(each.default, each.unit))} | {cell(each.meaning)} |\n"
        for each in variables(Settings.model_construct())
    )
    return _HEAD + "".join(rows)
