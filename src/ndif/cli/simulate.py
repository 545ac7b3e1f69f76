"""`ndif simulate`: replay requests through the server's queue and placement in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ndif.cli.output import console, show_json
from ndif.cli.server_client import CommandError, json_option
from ndif.config.units import format_duration

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("simulate")
@click.argument("trace", metavar="TRACE.jsonl", type=_FILE)
@click.option(
    "--cluster",
    "cluster_file",
    type=_FILE,
    required=True,
    help="YAML or JSON file of the nodes and models.",
)
@click.option("--seed", type=int, default=0, help="Seed of the random numbers.")
@json_option
@click.option(
    "--top",
    type=click.IntRange(1),
    default=20,
    help="Maximum number of rows per table; JSON contains all.",
)
@click.option(
    "--generate",
    is_flag=True,
    help="Generate TRACE.jsonl instead, and the cluster file if it does not exist.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 10_000_000),
    default=100_000,
    help="With --generate: number of requests.",
)
@click.option(
    "--models",
    type=click.IntRange(1, 100_000),
    default=300,
    help="With --generate and without a cluster file: number of models.",
)
@click.option(
    "--users",
    type=click.IntRange(1, 1_000_000),
    default=500,
    help="With --generate: number of users.",
)
@click.option(
    "--hours",
    type=click.FloatRange(0, 24 * 366, min_open=True),
    default=24.0,
    help="With --generate: time span of the requests, in hours.",
)
def command(
    generate: bool,
    as_json: bool,
    top: int,
    trace: Path,
    cluster_file: Path,
    seed: int,
    **shape: Any,
) -> None:
    """Replay the requests of TRACE.jsonl on a simulated cluster.

    The simulation uses the server's queue, placement, eviction and scaling. The cluster file sets the times
    that replicas take. The same trace, cluster and seed give the same report.
    """
    if generate:
        _generate(trace, cluster_file, seed, **shape)
    else:
        _simulate(trace, cluster_file, seed, as_json, top)


def _generate(
    trace: Path, cluster_file: Path, seed: int, requests: int, models: int, users: int, hours: float
) -> None:
    from ndif.simulation import generate
    from ndif.simulation.trace import write
    from ndif.simulation.world import read_file

    if trace.exists():
        raise CommandError(f"{trace} exists already and is not overwritten: choose another name.")
    if not cluster_file.exists():
        try:
            cluster_file.write_text(generate.cluster(generate.names(models), seed))
        except OSError as error:
            raise CommandError(f"{cluster_file} cannot be written: {error.strerror}.") from error
        click.echo(f"Wrote {cluster_file}: a cluster with {models:,} models.", err=True)
    names = read_file(cluster_file).names
    if not names:
        raise CommandError(f"{cluster_file} names no models to request.")
    write(trace, generate.trace(names, requests, seed, users=users, length_s=hours * 3600))
    click.echo(f"Wrote {trace}: {requests:,} requests in {hours:g} hours.", err=True)


def _simulate(trace: Path, cluster_file: Path, seed: int, as_json: bool, top: int) -> None:
    import logging
    import time

    from rich.console import Console
    from rich.progress import Progress

    from ndif.simulation.report import report
    from ndif.simulation.run import run
    from ndif.simulation.tables import show
    from ndif.simulation.trace import read_file as read_trace
    from ndif.simulation.world import read_file

    world, requests = read_file(cluster_file), read_trace(trace)
    errors, ours = Console(stderr=True), logging.getLogger("ndif")
    began, level = time.monotonic(), ours.level
    # The report contains everything that a server would log, such as thousands of refusals.
    ours.setLevel(logging.CRITICAL)
    try:
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("Simulating", total=len(requests))
            journal = run(world, requests, seed, lambda count: bar.update(task, completed=count))
    finally:
        ours.setLevel(level)
    result = report(world, journal, seed)
    took = time.monotonic() - began
    if as_json:
        show_json(result)
    else:
        show(result, console(), top)
    errors.print(
        f"Simulated {format_duration(result['trace']['ended_s'])} in {format_duration(took)}.",
        highlight=False,
    )
