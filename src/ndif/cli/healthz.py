"""`ndif healthz`: health of the server and services of this machine, for containers and supervisors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ndif.cli.output import show_json
from ndif.cli.server_client import CommandError, json_option, run_folders

if TYPE_CHECKING:
    from ndif.launch.run_folder import RunFolder, RunRecord


@click.command("healthz")
@click.option("--ready", is_flag=True, help="Also fail while the server cannot run jobs.")
@json_option
def command(ready: bool, as_json: bool) -> None:
    """Check that the server, worker and services of this machine are healthy; exit code 0 if so, else 1.

    The command checks the parts that `ndif start` started with the same NDIF_SESSION_ROOT. A server is
    healthy if it answers at /ping, with --ready at /connected; a service started alone, if it accepts
    connections; a worker, if its Ray node runs.
    """
    checks = _checks(ready)
    if as_json:
        show_json({"healthy": bool(checks) and all(checks.values()), "checks": checks})
    if not checks:
        raise CommandError(
            f"No server, worker or service of `ndif start` runs with the session root {run_folders().root}."
        )
    failed = [name for name, is_well in checks.items() if not is_well]
    if failed:
        raise CommandError(f"Not healthy: {', '.join(failed)}.")
    if not as_json:
        click.echo(f"Healthy: {', '.join(checks)}.")


def _checks(ready: bool) -> dict[str, bool]:
    """Return the health of each server, worker and service of this session root, by name."""
    from ndif.launch.services import STANDALONE
    from ndif.launch.services.service import accepts_connections

    folders = run_folders()
    health: dict[str, bool] = {}
    running = folders.running()
    if running is not None:
        record = running[1]
        if record.node_type == "worker":
            health["worker"] = _has_node(*running)
        else:
            health["server"] = _server_answers(record, ready)
    for name in STANDALONE:
        alone = folders.of_service(name).running()
        if alone is not None:
            folder, record = alone
            is_up = accepts_connections(record.host, record.port)
            health[name] = is_up and (name != "ray" or _has_node(folder, record))
    return health


def _has_node(folder: RunFolder, record: RunRecord) -> bool:
    from ndif.launch.services.processes import processes_of
    from ndif.launch.services.ray import has_started

    return has_started(folder) and bool(processes_of(record.pid, "ray"))


def _server_answers(record: RunRecord, ready: bool) -> bool:
    import httpx

    from ndif.net import local_url

    url = local_url(record.host, record.port)
    options: dict[str, Any] = {"timeout": 5, "trust_env": False, "verify": False}
    try:
        response = httpx.get(f"{url}/{'connected' if ready else 'ping'}", **options)
    except httpx.HTTPError:
        return False
    return response.is_success
