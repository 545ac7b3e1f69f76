"""`ndif version`: the version of ndif."""

from __future__ import annotations

import json

import click

from ndif.cli.server_client import json_option


@click.command("version")
@json_option
def command(as_json: bool) -> None:
    """Print the version."""
    from ndif import __version__

    click.echo(json.dumps({"version": __version__}) if as_json else __version__)
