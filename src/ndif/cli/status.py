"""`ndif status`: nodes, models, replicas and the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.durations import DurationParam
from ndif.cli.output import below_head, elapsed, refresh, table
from ndif.cli.server_client import ServerClient, read, with_server
from ndif.config.short_ids import unique_length
from ndif.config.units import format_duration
from ndif.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ndif.schema.server_state import (
        BookedWindow,
        GpuState,
        ModelState,
        ReplicaStatus,
        ScheduleState,
        ServerState,
    )


_NOT_DEPLOYED = "NOT DEPLOYED"
"""State of a model without a processor."""


@click.command("status")
@click.option(
    "--watch",
    type=DurationParam(0.2),
    metavar="DURATION",
    help="Refresh at this interval, such as 2s.",
)
@with_server
def command(server: ServerClient, as_json: bool, watch: float | None) -> None:
    """Show nodes, models, replicas and the schedule."""
    refresh(lambda: server.get("/admin/status"), as_json, _rendered, watch)


def _rendered(answer: Any) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ndif.schema.server_state import ServerState

    server = read(ServerState, answer)
    parts: list[RenderableType] = [
        table("Nodes", ("node", "device", "memory", "free"), _nodes(server))
    ]
    parts.append(_models(server) if server.models else Text("No model is deployed."))
    parts += [Text(line, style="yellow") for line in server.problems]
    parts += [Text(line, style="yellow") for line in _failed_probes(server)]
    parts += [Text(line) for line in _schedule(server.schedule)]
    return Group(*parts)


def _failed_probes(server: ServerState) -> Iterator[str]:
    for model in server.models:
        if (probe := model.probe) and probe.up is False:
            label = f"{_name(model)} by nnsight {model.generation}"
            outcome = probe.outcome.value + (f": {probe.reason}" if probe.reason else "")
            yield f"The last probe of {label}: {outcome}"


def _name(model: ModelState) -> str:
    return f"{model.repo_id} ({model.revision})" if model.revision else model.repo_id


def _nodes(server: ServerState) -> Iterator[tuple[object, ...]]:
    for node in server.nodes:
        gpus = ((_device(n, gpu), gpu) for n, gpu in enumerate(node.gpus))
        devices = [*gpus, ("CPU", node.cpu)]
        yield from below_head(
            [node.name],
            (
                (name, format_size(memory.bytes), format_size(memory.free_bytes))
                for name, memory in devices
            ),
        )


def _device(index: int, gpu: GpuState) -> str:
    name = f"GPU {index} ({gpu.uuid[:12]})" if gpu.uuid else f"GPU {index}"
    return f"{name}, withdrawn" if gpu.withdrawn else name


def _models(server: ServerState) -> RenderableType:
    names = {node.id: node.name for node in server.nodes}
    ids = (replica.replica_id for model in server.models for replica in model.replicas)
    length = unique_length(ids)
    rows: list[tuple[object, ...]] = []
    for model in server.models:
        head = (
            _name(model) + (", dedicated" if model.dedicated else ""),
            model.generation,
            model.processor.value
            if model.processor
            else _not_deployed(model, server.schedule.windows),
            model.waiting,
            format_size(model.size_bytes),
        )
        replicas = [_replica(replica, names, length) for replica in model.replicas]
        rows += below_head(head, replicas or [("none", "", "", "")])
    headings = ("model", "nnsight", "state", "waiting", "size")
    return table("Models", (*headings, "replica", "replica state", "age", "location"), rows)


def _not_deployed(model: ModelState, windows: Iterable[BookedWindow]) -> str:
    """Return the state of a model without a processor, and when a booking loads it."""
    starts = [window.start for window in windows if window.model == model.repo_id]
    if not starts:
        return _NOT_DEPLOYED
    start = datetime.fromisoformat(min(starts))
    if start <= datetime.now(timezone.utc):
        return f"{_NOT_DEPLOYED}, booked now: it is about to be loaded"
    return f"{_NOT_DEPLOYED}, booked from {start.isoformat(sep=' ', timespec='minutes')} on"


def _replica(replica: ReplicaStatus, names: Mapping[str, str], length: int) -> tuple[object, ...]:
    state = replica.state
    if replica.total and state == "DEPLOYING":
        state += f" {100 * (replica.done or 0) / replica.total:.0f} %"
    elif replica.request_id:
        # A prefix is enough for `ndif kill`, which asks for more if it is ambiguous.
        state += f" {replica.request_id[:8]}"
    elif state == "RUNNING":
        state = "IDLE"
    gpus = ", ".join(f"GPU {gpu}" for gpu in replica.gpu_mem_bytes_by_id)
    node = names.get(replica.node_id, replica.node_id)
    place = "CPU" if replica.on_cpu else gpus
    where = f"{place} of {node}" if place else node
    return replica.replica_id[:length], state, elapsed(replica.deployed), where


def _schedule(schedule: ScheduleState) -> Iterator[str]:
    if schedule.source:
        following = schedule.next_change or "none"
        every = format_duration(schedule.read_every_s)
        yield f"Schedule: {schedule.source}, read every {every}; next change: {following}."
    now = datetime.now(timezone.utc)
    for window in schedule.windows:
        is_on = datetime.fromisoformat(window.start) <= now
        yield f"  {window.model}: {window.start} to {window.end}{', now' if is_on else ''}"
    yield from (f"  {problem}" for problem in schedule.problems)
