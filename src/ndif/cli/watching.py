"""`--watch`: the same answer again and again, until interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.output import console, show_json

if TYPE_CHECKING:
    from rich.console import RenderableType

LEAST_S = 0.2


def show(
    ask: Callable[[], Any],
    draw: Callable[[Any], RenderableType],
    *,
    as_json: bool,
    every_s: float | None,
) -> None:
    """Show what `ask` answers, once or every `every_s` seconds; as JSON one answer a line then."""
    if every_s is None:
        if as_json:
            show_json(ask())
        else:
            console().print(draw(ask()))
        return
    try:
        if as_json:
            _lines(ask, every_s)
        else:
            _live(ask, draw, every_s)
    except KeyboardInterrupt:
        return


def _lines(ask: Callable[[], Any], every_s: float) -> None:
    import json

    while True:
        click.echo(json.dumps(ask()))
        time.sleep(every_s)


def _live(ask: Callable[[], Any], draw: Callable[[Any], RenderableType], every_s: float) -> None:
    from rich.live import Live

    with Live(draw(ask()), console=console(), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(every_s)
            live.update(draw(ask()), refresh=True)
