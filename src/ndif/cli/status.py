"""`ndif status`: machines, models, replicas and the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.durations import DurationParam
from ndif.cli.output import elapsed, name_of, refresh, table, under
from ndif.cli.server_client import ServerClient, with_server
from ndif.config.short_ids import unique_length
from ndif.config.units import format_duration
from ndif.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType


_NOT_DEPLOYED = "NOT DEPLOYED"
"""State of a model that nobody has asked for."""


@click.command("status")
@click.option(
    "--watch", type=DurationParam(0.2), metavar="DURATION", help="Repeat so often, such as 2s."
)
@with_server
def command(server: ServerClient, as_json: bool, watch: float | None) -> None:
    """Show machines, models and replicas."""
    refresh(lambda: server.get("/admin/status"), as_json, _rendered, watch)


def _rendered(status: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        table("Machines", ("machine", "device", "memory", "free"), _machines(status))
    ]
    parts.append(_models(status) if status["models"] else Text("No model is deployed."))
    parts += [Text(line, style="yellow") for line in status["problems"]]
    parts += [Text(line, style="yellow") for line in _failed_probes(status)]
    parts += [Text(line) for line in _schedule(status["schedule"])]
    return Group(*parts)


def _failed_probes(status: Mapping[str, Any]) -> Iterator[str]:
    for model in status["models"]:
        if (probe := model.get("probe")) and probe["up"] is False:
            of = f"{name_of(model)} by nnsight {model['generation']}"
            why = f"{probe['outcome']}: {probe['reason']}" if probe["reason"] else probe["outcome"]
            yield f"The last probe of {of}: {why}"


def _machines(status: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for node in status["nodes"]:
        gpus = ((_device(n, gpu), gpu) for n, gpu in enumerate(node["gpus"]))
        devices = [*gpus, ("CPU", node["cpu"])]
        yield from under(
            [node["name"]],
            (
                (name, format_size(memory["bytes"]), format_size(memory["free_bytes"]))
                for name, memory in devices
            ),
        )


def _device(index: int, gpu: Mapping[str, Any]) -> str:
    """Name a GPU by its index and the first characters of its UUID."""
    uuid = gpu.get("uuid")
    name = f"GPU {index} ({uuid[:12]})" if uuid else f"GPU {index}"
    return f"{name}, withdrawn" if gpu.get("withdrawn") else name


def _models(status: Mapping[str, Any]) -> RenderableType:
    names = {node["id"]: node["name"] for node in status["nodes"]}
    ids = (each["replica_id"] for model in status["models"] for each in model["replicas"])
    length = unique_length(ids)
    rows: list[tuple[object, ...]] = []
    for model in status["models"]:
        head = (
            name_of(model) + (", dedicated" if model["dedicated"] else ""),
            model["generation"],
            model["processor"] or _not_deployed(model, status["schedule"]["windows"]),
            model["waiting"],
            format_size(model["size_bytes"]),
        )
        replicas = [_replica(replica, names, length) for replica in model["replicas"]]
        rows += under(head, replicas or [("none", "", "", "")])
    of_model = ("model", "nnsight", "state", "waiting", "size")
    return table("Models", (*of_model, "replica", "replica's state", "age", "where"), rows)


def _not_deployed(model: Mapping[str, Any], windows: Iterable[Mapping[str, Any]]) -> str:
    """Return the state of a model without replicas, and when a booking has it loaded."""
    starts = [each["start"] for each in windows if each["model"] == model["repo_id"]]
    if not starts:
        return _NOT_DEPLOYED
    start = datetime.fromisoformat(min(starts))
    if start <= datetime.now(timezone.utc):
        return f"{_NOT_DEPLOYED}, booked now: it is about to be loaded"
    return f"{_NOT_DEPLOYED}, booked from {start.isoformat(sep=' ', timespec='minutes')} on"


def _replica(
    replica: Mapping[str, Any], names: Mapping[str, str], length: int
) -> tuple[object, ...]:
    state = replica["state"]
    if replica["total"] and state == "DEPLOYING":
        state += f" {100 * (replica['done'] or 0) / replica['total']:.0f} %"
    elif replica["request_id"]:
        # Its beginning is enough for `ndif kill`, which asks for more where it is not.
        state += f" {replica['request_id'][:8]}"
    elif state == "RUNNING":
        state = "IDLE"
    gpus = ", ".join(f"GPU {gpu}" for gpu in replica["gpu_mem_bytes_by_id"])
    node = str(names.get(replica["node_id"], replica["node_id"]))
    place = "CPU" if replica["on_cpu"] else gpus
    where = f"{place} of {node}" if place else node
    return replica["replica_id"][:length], state, elapsed(replica["deployed"]), where


def _schedule(schedule: Mapping[str, Any]) -> Iterator[str]:
    if schedule["source"]:
        following = schedule["next_change"] or "none"
        every = format_duration(schedule["read_every_s"])
        yield f"Schedule: {schedule['source']}, read every {every}; next change: {following}."
    now = datetime.now(timezone.utc)
    for window in schedule["windows"]:
        is_on = datetime.fromisoformat(window["start"]) <= now
        yield f"  {window['model']}: {window['start']} to {window['end']}{', now' if is_on else ''}"
    yield from (f"  {problem}" for problem in schedule["problems"])
