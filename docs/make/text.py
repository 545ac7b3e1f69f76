"""Markdown of single values."""

from __future__ import annotations

import re

_NAMES = re.compile(r"(?<![`\w])((?:NDIF|OTEL|POSTGRES)_[A-Z0-9_]+|--[a-z][a-z-]+)(?![`\w])")


def code(value: str) -> str:
    """Return a value as code in a cell of a table; "" if it is empty."""
    return f"`{value.replace('|', chr(92) + '|')}`" if value else ""


def cell(text: str) -> str:
    """Return prose as a cell of a table: on one line, names of variables and options as code."""
    escaped = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    parts = escaped.split("`")
    # Every second part is code already.
    parts[::2] = [_NAMES.sub(r"`\1`", part).replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)
