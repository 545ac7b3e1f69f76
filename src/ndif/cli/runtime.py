"""`ndif runtime`: the nnsight generations that the server serves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.output import show_json
from ndif.cli.server_client import json_option, options
from ndif.errors import NdifError

if TYPE_CHECKING:
    from ndif.host.runtimes import Runtime, Runtimes


@click.group("runtime")
def command() -> None:
    """Install the nnsight generations that clients of this server may use."""


def _runtimes() -> Runtimes:
    from ndif.host.runtimes import Runtimes

    return Runtimes(options().runtimes)


@contextlib.contextmanager
def _errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except (NdifError, OSError) as error:
        raise click.ClickException(str(error)) from error


@command.command("list")
@json_option
def list_runtimes(as_json: bool) -> None:
    """Show installed and available nnsight generations."""
    from ndif.host.runtimes import SUPPORTED

    installed = _runtimes().installed()
    rows = [_row(name, installed.get(name)) for name in dict.fromkeys([*installed, *SUPPORTED])]
    if as_json:
        show_json(rows)
        return

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("generation", "version")
    table.add_column("where", overflow="fold")
    for row in rows:
        if row["install"]:
            where, style = f"not installed; to install: {row['install']}", "dim"
        else:
            where, style = escape(row["path"][0]) if row["path"] else "installed with ndif", ""
        table.add_row(row["generation"], row["version"] or "-", where, style=style)
    Console().print(table)


def _row(generation: str, runtime: Runtime | None) -> dict[str, Any]:
    return {
        "generation": generation,
        "version": runtime.version if runtime else None,
        "interpreter": str(runtime.interpreter) if runtime else None,
        "path": [str(folder) for folder in runtime.path] if runtime else [],
        "install": None if runtime else f"ndif runtime add {generation}",
    }


@command.command("add")
@click.argument("generation")
@json_option
def add(generation: str, as_json: bool) -> None:
    """Install the nnsight GENERATION, such as 0.7."""
    from ndif.host.runtimes import generation_of

    with _errors_as_sentences():
        runtime = _runtimes().add(
            generation_of(generation) or generation, lambda line: click.echo(line, err=True)
        )
    row = _row(runtime.generation, runtime)
    if as_json:
        click.echo(json.dumps({key: row[key] for key in ("generation", "version", "path")}))
    else:
        click.echo(f"nnsight {runtime.version} is installed in {row['path'][0]}")


@command.command("remove")
@click.argument("generation")
@json_option
def remove(generation: str, as_json: bool) -> None:
    """Remove the installed nnsight GENERATION."""
    from ndif.host.runtimes import generation_of

    generation = generation_of(generation) or generation
    with _errors_as_sentences():
        _runtimes().remove(generation)
    click.echo(
        json.dumps({"removed": generation}) if as_json else f"nnsight {generation} is removed"
    )
