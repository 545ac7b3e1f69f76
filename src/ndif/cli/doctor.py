"""`ndif doctor`: what this machine has to confine strangers' code with, layer by layer."""

from __future__ import annotations

import json

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Show every layer of the sandbox on this machine; exit 1 if one is missing that must not be."""
    from dataclasses import asdict

    from ndif.sandbox.layers import layers, missing

    found = layers()
    lacking = missing(found)
    if as_json:
        click.echo(json.dumps({"layers": [asdict(layer) for layer in found], "safe": not lacking}))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(title="What confines untrusted code here")
        for heading in ("layer", "here", "", "how, or what to do"):
            table.add_column(heading, overflow="fold")
        for layer in found:
            lacking_color = "red" if layer.required else "yellow"
            here = "[green]yes[/]" if layer.present else f"[{lacking_color}]no[/]"
            needed = "needed" if layer.required else "helps"
            table.add_row(layer.name, here, needed, layer.detail)
        console = Console()
        console.print(table)
        console.print(
            "Untrusted code runs confined on this machine."
            if not lacking
            else "Untrusted code is refused on this machine (NDIF_SANDBOX=best-effort runs it anyway)."
        )
    if lacking:
        raise SystemExit(1)
