"""`ndif version`: the version of ndif."""

from __future__ import annotations

import click

from ndif.cli.output import show_answer
from ndif.cli.server_client import json_option


@click.command("version")
@json_option
def command(as_json: bool) -> None:
    """Print the version."""
    from ndif import __version__

    show_answer({"version": __version__}, as_json, [__version__])
