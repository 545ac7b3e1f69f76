"""How commands show what a server said: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE = 200
_UNITS = ("B", "kB", "MB", "GB", "TB")


def warn_of_unread() -> None:
    """Say on standard error which variables are meant for this server and read by nothing."""
    from ndif.variables import unread

    for sentence in unread(os.environ):
        click.echo(f"Warning: {sentence}", err=True)


def show_json(value: Any) -> None:
    """Print it."""
    click.echo(json.dumps(value, indent=2))


def console() -> Console:
    """Where tables go; a pipe has no edge to fold them at."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=max(found.width, _WIDE))


def table(title: str, *headings: str) -> Table:
    """A table whose cells are folded, not cut."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def add_rows(made: Table, rows: Iterable[Iterable[object]]) -> Table:
    """Fill a table; what comes from a server is text, not markup."""
    from rich.markup import escape

    for row in rows:
        made.add_row(*(escape("-" if cell is None else str(cell)) for cell in row))
    return made


def size(count: float | None) -> str:
    """Bytes, as people read them."""
    if count is None:
        return "-"
    for unit in _UNITS:
        if abs(count) < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if count >= 100 or unit == "B" else f"{count:,.1f} {unit}"


def lasting(seconds: float | None) -> str:
    """A duration, as people read it."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    hours = whole // 3600
    if hours < 48:
        return f"{hours} h {whole % 3600 // 60} min"
    return f"{hours // 24} d {hours % 24} h"


def since(moment: float | None) -> str:
    """How long ago a moment was, in Unix seconds."""
    return "-" if moment is None else lasting(time.time() - moment)


def name_of(model: dict[str, Any]) -> str:
    """A model as people call it, with its revision if that is not the main one."""
    revision = model.get("revision")
    repo_id = str(model["repo_id"])
    return f"{repo_id} ({revision})" if revision and revision != "main" else repo_id


def called(variant: str) -> str:
    """A model in a runtime, as people call it."""
    from ndif.schema.variant import Variant

    try:
        found = Variant.parse(variant)
    except ValueError:
        return variant
    return f"{found.model.repo_id} (nnsight {found.generation})"
