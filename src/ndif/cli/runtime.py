"""`ndif runtime`: the nnsight generations that the server can serve."""

from __future__ import annotations

import click


@click.group("runtime")
def command() -> None:
    """Install the nnsight generations that clients of this server may use."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_runtimes(as_json: bool) -> None:
    """Show which nnsight generations are installed and which could be."""
    import json

    from ndif.config.settings import settings
    from ndif.host.runtimes import SUPPORTED, Runtimes

    installed = Runtimes(settings().runtimes).installed()
    missing = {
        generation: f"ndif runtime add {generation}"
        for generation in SUPPORTED
        if generation not in installed
    }
    if as_json:
        rows: list[dict[str, object]] = [
            {
                "generation": runtime.generation,
                "version": runtime.version,
                "interpreter": str(runtime.interpreter),
                "path": [str(folder) for folder in runtime.path],
                "install": None,
            }
            for runtime in installed.values()
        ]
        rows += [
            {
                "generation": generation,
                "version": None,
                "interpreter": None,
                "path": [],
                "install": install,
            }
            for generation, install in missing.items()
        ]
        click.echo(json.dumps(rows, indent=2))
        return

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("generation", "version")
    table.add_column("where", overflow="fold")
    for runtime in installed.values():
        where = escape(str(runtime.path[0])) if runtime.path else "installed with ndif"
        table.add_row(runtime.generation, runtime.version, where)
    for generation, install in missing.items():
        table.add_row(generation, "-", f"not installed; to install it: {install}", style="dim")
    Console().print(table)


@command.command("add")
@click.argument("generation")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def add(generation: str, as_json: bool) -> None:
    """Install the nnsight GENERATION, such as 0.7."""
    import json

    from ndif.config.settings import settings
    from ndif.host.runtimes import Runtimes, RuntimesError, generation_of

    try:
        runtime = Runtimes(settings().runtimes).add(
            generation_of(generation) or generation, lambda line: click.echo(line, err=True)
        )
    except (RuntimesError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        installed = {"generation": runtime.generation, "version": runtime.version}
        click.echo(json.dumps({**installed, "path": [str(folder) for folder in runtime.path]}))
    else:
        click.echo(f"nnsight {runtime.version} is installed in {runtime.path[0]}")


@command.command("remove")
@click.argument("generation")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def remove(generation: str, as_json: bool) -> None:
    """Remove the installed nnsight GENERATION."""
    import json

    from ndif.config.settings import settings
    from ndif.host.runtimes import Runtimes, RuntimesError, generation_of

    generation = generation_of(generation) or generation
    try:
        Runtimes(settings().runtimes).remove(generation)
    except (RuntimesError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        json.dumps({"removed": generation}) if as_json else f"nnsight {generation} is removed"
    )
