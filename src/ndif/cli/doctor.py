"""`ndif doctor`: checks of this machine before a server starts on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ndif.cli.output import console, show_json, table, warn_of_unread_variables
from ndif.cli.server_client import json_option, options
from ndif.launch.waiting import waiting_for

if TYPE_CHECKING:
    from ndif.launch.machine_checks import Check
    from ndif.sandbox.confinement.layers import Layer

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Check the sandbox, torch, the NVIDIA driver, GPUs, runtimes, disks, services and ports.

    The exit code is 1 if a server would not start here, or not as its variables configure it.
    """
    from dataclasses import asdict

    from ndif.launch.machine_checks import check_machine
    from ndif.sandbox.confinement.layers import detect_layers, missing_layers

    detected = detect_layers()
    lacking = missing_layers(detected)
    with waiting_for("the NVIDIA driver and the services to answer"):
        checks = check_machine(options())
    warn_of_unread_variables()
    if as_json:
        layers = [asdict(layer) for layer in detected]
        show_json(
            {
                "layers": layers,
                "safe": not lacking,
                "checks": [asdict(check) for check in checks],
            }
        )
    else:
        _show(detected, checks)
        console().print(
            "Untrusted code runs confined on this machine."
            if not lacking
            else "Untrusted code is refused on this machine (NDIF_SANDBOX=best-effort runs it anyway)."
        )
    if lacking or any(check.state == "problem" for check in checks):
        raise SystemExit(1)


def _show(layers: list[Layer], checks: list[Check]) -> None:
    from rich.table import Table

    sandbox = Table(title="Sandbox layers of this machine", title_justify="left")
    for heading in ("layer", "present", "required", "detail"):
        sandbox.add_column(heading, overflow="fold")
    for layer in layers:
        color = "red" if layer.required else "yellow"
        present = "[green]yes[/]" if layer.present else f"[{color}]no[/]"
        sandbox.add_row(layer.name, present, "yes" if layer.required else "no", layer.detail)
    console().print(sandbox)
    rest = table(
        "Checks of this machine",
        ("", "state", "detail"),
        ((check.name, check.state, check.detail) for check in checks),
    )
    for row, check in zip(rest.rows, checks, strict=True):
        row.style = None if check.state == "ok" else _COLORS[check.state]
    console().print(rest)
