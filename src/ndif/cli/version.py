"""`ndif version`."""

from __future__ import annotations

import click


@click.command("version")
def command() -> None:
    """Print the version."""
    from ndif import __version__

    click.echo(__version__)
