"""Output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from ndif.config.units import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_PIPE_WIDTH = 200


def warn_of_unread_variables() -> None:
    """Print a warning for each variable that is meant for this server and that nothing reads."""
    from ndif.config.reference import unread

    for sentence in unread(os.environ):
        click.echo(f"Warning: {sentence}", err=True)


def show_json(value: Any) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2))


def console() -> Console:
    """Return the console for tables, wide enough that a pipe gets unfolded lines."""
    from rich.console import Console

    found = Console(highlight=False)
    return (
        found
        if found.is_terminal
        else Console(highlight=False, width=max(found.width, _PIPE_WIDTH))
    )


def table(title: str, *headings: str) -> Table:
    """Return an empty table whose cells are folded instead of cut."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def add_rows(made: Table, rows: Iterable[Iterable[object]]) -> Table:
    """Fill a table with text from a server, which is not markup."""
    from rich.markup import escape

    for row in rows:
        made.add_row(*(escape("-" if cell is None else str(cell)) for cell in row))
    return made


def size(count: float | None) -> str:
    """Format a number of bytes; "-" for None."""
    return "-" if count is None else format_size(count)


def duration(seconds: float | None) -> str:
    """Format a duration in whole seconds; "-" for None."""
    return "-" if seconds is None else format_duration(max(0, round(seconds)))


def elapsed(moment: float | None) -> str:
    """Format the time that has passed since `moment`, in Unix seconds."""
    return "-" if moment is None else duration(time.time() - moment)


def name_of(model: dict[str, Any]) -> str:
    """Return a model's repo id, with its revision unless that is the main one."""
    revision = model.get("revision")
    repo_id = str(model["repo_id"])
    return f"{repo_id} ({revision})" if revision and revision != "main" else repo_id


def variant_name(variant: str) -> str:
    """Return the repo id and the nnsight generation that a variant's key names."""
    from ndif.schema.model_key import Variant

    try:
        found = Variant.parse(variant)
    except ValueError:
        return variant
    return f"{found.model.repo_id} (nnsight {found.generation})"


def show(
    fetch: Callable[[], Any],
    render: Callable[[Any], RenderableType],
    *,
    as_json: bool,
    interval_s: float | None,
) -> None:
    """Show what `fetch` returns: once, or every `interval_s` seconds, as JSON then one value a line."""
    if interval_s is None:
        if as_json:
            show_json(fetch())
        else:
            console().print(render(fetch()))
        return
    try:
        if as_json:
            _show_lines(fetch, interval_s)
        else:
            _show_live(fetch, render, interval_s)
    except KeyboardInterrupt:
        return


def _show_lines(fetch: Callable[[], Any], interval_s: float) -> None:
    while True:
        click.echo(json.dumps(fetch()))
        time.sleep(interval_s)


def _show_live(
    fetch: Callable[[], Any], render: Callable[[Any], RenderableType], interval_s: float
) -> None:
    from rich.live import Live

    with Live(render(fetch()), console=console(), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(render(fetch()), refresh=True)
