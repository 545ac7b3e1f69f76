"""`ndif doctor`: the sandbox layers that this machine offers."""

from __future__ import annotations

import json

import click

from ndif.cli.output import console
from ndif.cli.server_client import json_option


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Show the sandbox layers that this machine offers; the exit code is 1 if a required one is missing."""
    from dataclasses import asdict

    from ndif.sandbox.confinement.layers import detect_layers, missing_layers

    found = detect_layers()
    lacking = missing_layers(found)
    if as_json:
        click.echo(json.dumps({"layers": [asdict(layer) for layer in found], "safe": not lacking}))
    else:
        from rich.table import Table

        table = Table(title="Sandbox layers of this machine")
        for heading in ("layer", "present", "required", "how, or what to do"):
            table.add_column(heading, overflow="fold")
        for layer in found:
            color = "red" if layer.required else "yellow"
            present = "[green]yes[/]" if layer.present else f"[{color}]no[/]"
            table.add_row(layer.name, present, "yes" if layer.required else "no", layer.detail)
        console().print(table)
        console().print(
            "Untrusted code runs confined on this machine."
            if not lacking
            else "Untrusted code is refused on this machine (NDIF_SANDBOX=best-effort runs it anyway)."
        )
    if lacking:
        raise SystemExit(1)
