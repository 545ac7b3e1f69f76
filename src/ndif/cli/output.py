"""Output of commands: tables and sentences for people, JSON for programs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ndif.config.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

T = TypeVar("T")

_PIPE_WIDTH = 200


def warn_of_unread_variables() -> None:
    """Print a warning for each variable with the server's prefix that the server does not read."""
    from ndif.config.reference import unread

    for sentence in unread(os.environ):
        click.echo(f"Warning: {sentence}", err=True)


def show_json(value: Any) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    """Return an answer as plain JSON values, and any other value unchanged."""
    if not is_dataclass(value):
        return value
    from ndif.schema.answer import to_plain

    return to_plain(value)


def show_answer(answer: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print the server's answer to an operation as JSON, or else as `lines`."""
    if as_json:
        show_json(answer)
        return
    for line in lines:
        click.echo(line)


def console() -> Console:
    """Return the console for tables; in a pipe, make the console wide so that lines are not folded."""
    from rich.console import Console

    output = Console(highlight=False)
    if output.is_terminal:
        return output
    return Console(highlight=False, width=max(output.width, _PIPE_WIDTH))


def table(title: str, headings: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table; text is not parsed as markup, and long cells are folded."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table(title=title, title_justify="left", show_header=any(headings))
    for heading in headings:
        grid.add_column(heading, overflow="fold")
    for row in rows:
        grid.add_row(*(escape("-" if cell is None else str(cell)) for cell in row))
    return grid


def below_head(
    head: Sequence[object], rows: Iterable[Iterable[object]]
) -> Iterator[tuple[object, ...]]:
    """Yield each row prefixed with the cells of `head`, which are blank from the second row on."""
    for number, row in enumerate(rows):
        yield (*(head if number == 0 else [""] * len(head)), *row)


def duration(seconds: float | None) -> str:
    """Format a duration in whole seconds; "-" for None."""
    return format_duration(None if seconds is None else max(0, round(seconds)))


def elapsed(moment: float | None) -> str:
    """Format the time that has passed since `moment`, in Unix seconds."""
    return duration(None if moment is None else time.time() - moment)


def variant_name(variant: str) -> str:
    """Return the repo id and the nnsight generation in a variant's key; or the key, if it is invalid."""
    from ndif.schema.model_key import Variant

    try:
        parsed = Variant.parse(variant)
    except ValueError:
        return variant
    return f"{parsed.model.repo_id} (nnsight {parsed.generation})"


def show(answer: T, as_json: bool, render: Callable[[T], RenderableType]) -> None:
    """Print an answer as JSON, or else as a table."""
    if as_json:
        show_json(answer)
    else:
        console().print(render(answer))


def refresh(
    fetch: Callable[[], T],
    as_json: bool,
    render: Callable[[T], RenderableType],
    interval_s: float | None,
) -> None:
    """Show the result of `fetch` once, or every `interval_s` seconds; JSON is then one value per line."""
    if interval_s is None:
        show(fetch(), as_json, render)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _repeat(fetch, as_json, render, interval_s)


def _repeat(
    fetch: Callable[[], T],
    as_json: bool,
    render: Callable[[T], RenderableType],
    interval_s: float,
) -> None:
    while as_json:
        click.echo(json.dumps(_plain(fetch())))
        time.sleep(interval_s)

    from rich.live import Live

    with Live(render(fetch()), console=console(), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(render(fetch()), refresh=True)
