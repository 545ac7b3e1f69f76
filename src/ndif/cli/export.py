"""`ndif export`: a deployment file of the models deployed now."""

from __future__ import annotations

import click

from ndif.cli.output import show_json
from ndif.cli.server_client import ServerClient, with_server


@click.command("export")
@with_server
def command(server: ServerClient, as_json: bool) -> None:
    """Print a deployment file of the models deployed now, as YAML or with --json as JSON."""
    deployments = server.get("/admin/export")["deployments"]
    if as_json:
        show_json(deployments)
        return

    import yaml

    click.echo(yaml.safe_dump(deployments, sort_keys=False, allow_unicode=True), nl=False)
