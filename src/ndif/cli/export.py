"""`ndif export`."""

from __future__ import annotations

import click

from ndif.cli.admin import Server, to_a_server


@click.command("export")
@to_a_server
def command(server: Server, as_json: bool) -> None:
    """Print a deployment file that brings up what is deployed now (YAML, or JSON with --json)."""
    from ndif.cli.output import show_json

    deployments = server.get("/admin/export")["deployments"]
    if as_json:
        show_json(deployments)
        return

    import yaml

    click.echo(yaml.safe_dump(deployments, sort_keys=False, allow_unicode=True), nl=False)
