"""`ndif version`: the version of ndif."""

from __future__ import annotations

import click


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Print the version."""
    import json

    from ndif import __version__

    click.echo(json.dumps({"version": __version__}) if as_json else __version__)
