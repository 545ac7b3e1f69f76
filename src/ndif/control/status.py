"""Models, replicas, queues and jobs as JSON, for `/admin/status`, `/admin/queue` and `/admin/trace`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from ndif.cluster.controller import Controller
from ndif.cluster.models import Model
from ndif.cluster.replica import Replica
from ndif.cluster.status import describe_replica
from ndif.probe.history import Histories
from ndif.probe.probe import Target
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor
from ndif.schema.job_record import JobRecord
from ndif.schema.model_key import Variant
from ndif.schema.request import Request
from ndif.schema.states import ProcessorStatus
from ndif.schema.status import Status
from ndif.schema.step import Step, in_order


def describe_server(
    controller: Controller, dispatcher: Dispatcher, probes: Histories | None = None
) -> dict[str, Any]:
    """Return every node and model, and the problems of the server, as JSON."""
    nodes = [
        {"id": node.id, "name": node.name, **node.resources.describe()}
        for node in controller.cluster.nodes.values()
    ]
    replicas = controller.replicas()
    models = []
    for model in controller.models:
        mine = [each for each in replicas if each.model is model]
        generations: set[str | None] = {each.generation for each in mine}
        generations |= model.problems.keys()
        processors = dispatcher.processors.values()
        generations |= {p.variant.generation for p in processors if p.model is model}
        models += [
            _model(controller, dispatcher, model, generation, mine, probes or Histories())
            for generation in sorted(generations, key=str) or [None]
        ]
    problems = [*controller.device_problems()]
    for model in controller.models:
        problems += model.problems.values()
    # Two generations may have the same problem: that there is no room, for example.
    return {"nodes": nodes, "models": models, "problems": list(dict.fromkeys(problems))}


def _model(
    controller: Controller,
    dispatcher: Dispatcher,
    model: Model,
    generation: str | None,
    replicas: list[Replica],
    probes: Histories,
) -> dict[str, Any]:
    """Return one model in one generation; in None, a model that no replica or request uses."""
    key = model.config.key
    variant = Variant(model.key, generation or "")
    processor = dispatcher.processors.get(variant)
    workers = processor.replicas if processor else ()
    running = {worker.id: run.entry.id for worker in workers for run in worker.runs[:1]}
    return {
        "model_key": str(key),
        "repo_id": key.repo_id,
        "revision": key.revision,
        "task": key.task,
        "generation": generation,
        "dedicated": model.dedicated,
        "size_bytes": controller.size_of(variant),
        "desired_replicas": processor.desired_replicas if processor else model.deployment.replicas,
        "processor": _processor_state(controller, processor),
        "waiting": len(processor.queue) if processor else 0,
        "problem": model.problems.get(generation or ""),
        "probe": probes.describe_for_operator(Target.of(key, generation or "")),
        "replicas": [
            {**describe_replica(each), "request_id": running.get(each.placed.replica_id)}
            for each in replicas
            if each.generation == generation
        ],
    }


def _processor_state(controller: Controller, processor: Processor | None) -> str | None:
    """Return a processor's status; PROVISIONING also while replicas for an operator have no place."""
    if processor is None:
        return None
    is_sought = processor.variant in controller.undecided(processor.model)
    if is_sought and processor.status is ProcessorStatus.UNINITIALIZED:
        return ProcessorStatus.PROVISIONING.value
    return processor.status.value


def describe_queues(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return the running and waiting requests of every processor as JSON."""
    return {"models": [_requests(processor) for processor in dispatcher.processors.values()]}


def describe_waits(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    """Return for how long each queue waits: the cost does not grow with the number of its requests."""
    wall = time.time() - asyncio.get_running_loop().time()
    found = []
    for processor in dispatcher.processors.values():
        oldest = next(iter(processor.queue), None)
        dispatched = [wall + run.since for run in processor.replicas.runs]
        found.append(
            {
                "model_key": str(processor.model.config.key),
                "generation": processor.variant.generation,
                "waiting": len(processor.queue),
                "oldest": None if oldest is None else oldest.item.received,
                "running": len(dispatched),
                "last_dispatched": max(dispatched, default=None),
            }
        )
    return found


def describe_jobs(dispatcher: Dispatcher, user: str | None) -> list[dict[str, Any]]:
    """Return the unfinished jobs of a user, or of all, the newest first, as JSON."""
    places: dict[str, tuple[int, float | None]] = {}
    for processor in dispatcher.processors.values():
        for entry, position in processor.queue.positions():
            places[entry.id] = position, processor.expected_wait_s(position)
    jobs = []
    for request, status, dispatched in dispatcher.lifecycle.unfinished():
        if user not in (None, request.user):
            continue
        place = places.get(request.id)
        jobs.append(
            {
                "id": request.id,
                "user": request.user,
                "model": request.model.repo_id,
                "generation": request.generation,
                "status": status.value,
                "received": request.received,
                "dispatched": dispatched,
                "ended": None,
                "position": None if place is None else place[0],
                "expected_start_s": None if place is None else place[1],
            }
        )
    return sorted(jobs, key=lambda job: -float(job["received"] or 0))


def _requests(processor: Processor) -> dict[str, Any]:
    key = processor.model.config.key
    wall = time.time() - asyncio.get_running_loop().time()
    running = [
        {
            "request_id": run.entry.id,
            "user": run.entry.user,
            "replica_id": worker.id,
            "since": wall + run.since,
        }
        for worker in processor.replicas
        for run in worker.runs
    ]
    waiting = [
        {
            "request_id": entry.id,
            "user": entry.user,
            "position": position,
            "received": entry.item.received,
            "expected_start_s": processor.expected_wait_s(position),
        }
        for entry, position in processor.queue.positions()
    ]
    return {
        "model_key": str(key),
        "repo_id": key.repo_id,
        "generation": processor.variant.generation,
        "processor": processor.status.value,
        "running": running,
        "waiting": waiting,
    }


def trace_of_request(request: Request, status: Status, steps: Iterable[Step]) -> dict[str, Any]:
    """Return the steps of a job that has not ended, as JSON."""
    return _trace(
        id=request.id,
        user=request.user,
        model=request.model.repo_id,
        generation=request.generation,
        status=status.value,
        reason="",
        received=request.received,
        ended=None,
        traceparent=request.traceparent,
        steps=steps,
    )


def trace_of_record(record: JobRecord) -> dict[str, Any]:
    """Return the steps of a job that has ended, as JSON."""
    return _trace(
        id=record.id,
        user=record.user,
        model=record.model,
        generation=record.generation,
        status=record.status,
        reason=record.reason,
        received=record.received,
        ended=record.ended,
        traceparent=record.traceparent,
        steps=record.steps,
    )


def _trace(*, steps: Iterable[Step], **fields: Any) -> dict[str, Any]:
    return {**fields, "steps": [step._asdict() for step in in_order(steps)]}
