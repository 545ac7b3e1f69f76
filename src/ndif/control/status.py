"""What an operator sees of models, replicas and lines."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ndif.cluster.controller import Controller
from ndif.cluster.hosted import Hosted
from ndif.cluster.models import Model
from ndif.cluster.status import generation_of, replica
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor
from ndif.schema.variant import Variant


def status_of(controller: Controller, dispatcher: Dispatcher) -> dict[str, Any]:
    """Every node and every model, as `/admin/status` tells them."""
    nodes = [
        {"id": node.id, "name": node.name, **node.resources.describe()}
        for node in controller.cluster.nodes.values()
    ]
    hosted = controller.replicas()
    models = []
    for model in controller.models:
        mine = [each for each in hosted if each.model is model]
        generations: set[str | None] = {generation_of(each) for each in mine}
        generations |= model.problems.keys()
        generations |= {
            variant.generation
            for variant, processor in dispatcher.processors.items()
            if processor.model is model
        }
        models += [
            _model(controller, dispatcher, model, generation, mine)
            for generation in sorted(generations, key=str) or [None]
        ]
    # Two generations may have the same: that there is no room, say.
    problems = dict.fromkeys(
        [
            *controller.device_problems(),
            *(said for model in controller.models for said in model.problems.values()),
        ]
    )
    return {"nodes": nodes, "models": models, "problems": list(problems)}


def _model(
    controller: Controller,
    dispatcher: Dispatcher,
    model: Model,
    generation: str | None,
    hosted: list[Hosted],
) -> dict[str, Any]:
    """One model in one runtime; in none, where it is only known."""
    key = model.config.key
    variant = Variant(model.key, generation or "")
    processor = dispatcher.processors.get(variant)
    running = {r.id: r.run.entry.id for r in processor.replicas if r.run} if processor else {}
    return {
        "model_key": str(key),
        "repo_id": key.repo_id,
        "revision": key.revision,
        "task": key.task,
        "generation": generation,
        "dedicated": model.dedicated,
        "size_bytes": controller.size_of(variant),
        "desired_replicas": processor.desired_replicas if processor else model.wanted.replicas,
        "processor": processor.status.value if processor else None,
        "waiting": len(processor.line) if processor else 0,
        "problem": model.problems.get(generation or ""),
        "replicas": [
            {**replica(each), "request_id": running.get(each.deployment.replica_id)}
            for each in hosted
            if generation_of(each) == generation
        ],
    }


def queue_of(dispatcher: Dispatcher) -> dict[str, Any]:
    """Every line, as `/admin/queue` tells it."""
    return {"models": [_line(processor) for processor in dispatcher.processors.values()]}


def _line(processor: Processor) -> dict[str, Any]:
    key = processor.model.config.key
    wall = time.time() - asyncio.get_running_loop().time()
    running = [
        {
            "request_id": replica_.run.entry.id,
            "user": replica_.run.entry.user,
            "replica_id": replica_.id,
            "since": wall + replica_.run.since,
        }
        for replica_ in processor.replicas
        if replica_.run is not None
    ]
    waiting = [
        {
            "request_id": entry.id,
            "user": entry.user,
            "position": position,
            "received": entry.what.received,
            "expected_start_s": processor.expected_wait_s(position),
        }
        for entry, position in processor.line.positions()
    ]
    return {
        "model_key": str(key),
        "repo_id": key.repo_id,
        "generation": processor.variant.generation,
        "processor": processor.status.value,
        "running": running,
        "waiting": waiting,
    }
