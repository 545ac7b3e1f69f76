"""The state of a server, its queues and its jobs, read from the controller and the dispatcher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from ndif.cluster.controller import Controller
from ndif.cluster.models import Model
from ndif.cluster.replica import Replica
from ndif.placement.node import Node
from ndif.probe.history import Histories
from ndif.probe.probe import Target
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor
from ndif.queue.replicas import ReplicaWorker
from ndif.schema.answer import project
from ndif.schema.job_state import (
    JobState,
    Queues,
    QueueState,
    RunningRequest,
    Trace,
    TraceStep,
    WaitingRequest,
)
from ndif.schema.model_key import Variant
from ndif.schema.request import Request
from ndif.schema.server_state import (
    GpuState,
    MemoryState,
    ModelState,
    NodeState,
    Problem,
    ProblemKind,
    QueueWait,
    ReplicaStatus,
    subject_of,
)
from ndif.schema.states import DeploymentLevel, ProcessorStatus
from ndif.schema.status import Status
from ndif.schema.step import Step
from ndif.telemetry.model_labels import MODELS


def current_problems(controller: Controller) -> Iterator[Problem]:
    """Yield the problems of GPUs, and the problems of models that failed to load."""
    yield from controller.device_problems()
    for model in controller.models:
        for generation, text in model.problems.items():
            subject = subject_of(model.config.key.label, generation)
            yield Problem(ProblemKind.LOAD_FAILED, subject, text)


def sentences(problems: Iterable[Problem]) -> list[str]:
    """Return the texts of problems without duplicates; two generations may have the same problem."""
    return list(dict.fromkeys(problem.text for problem in problems))


def node_states(controller: Controller) -> list[NodeState]:
    """Return the state of every node."""
    return [node_state(node) for node in controller.cluster.nodes.values()]


def node_state(node: Node) -> NodeState:
    """Return the state of one node."""
    resources = node.resources
    gpus = zip(resources.gpu_bytes, resources.free_gpu_bytes, resources.gpu_uuids, strict=True)
    return NodeState(
        id=node.id,
        name=node.name,
        gpus=[
            GpuState(
                bytes=total, free_bytes=free, uuid=uuid, withdrawn=index in resources.withdrawn
            )
            for index, (total, free, uuid) in enumerate(gpus)
        ],
        gpu_context_bytes=resources.context_bytes,
        cpu=MemoryState(bytes=resources.cpu_bytes, free_bytes=resources.free_cpu_bytes),
    )


def model_states(
    controller: Controller, dispatcher: Dispatcher, histories: Histories | None = None
) -> list[ModelState]:
    """Return the state of every model by generation; the generation is None for a model not in use."""
    replicas = controller.replicas()
    states = []
    for model in controller.models:
        own_replicas = [replica for replica in replicas if replica.model is model]
        generations: set[str | None] = {replica.generation for replica in own_replicas}
        generations |= model.problems.keys()
        processors = dispatcher.processors.values()
        generations |= {p.variant.generation for p in processors if p.model is model}
        states += [
            _model(
                controller, dispatcher, model, generation, own_replicas, histories or Histories()
            )
            for generation in sorted(generations, key=str) or [None]
        ]
    return states


def _model(
    controller: Controller,
    dispatcher: Dispatcher,
    model: Model,
    generation: str | None,
    replicas: list[Replica],
    histories: Histories,
) -> ModelState:
    key = model.config.key
    variant = Variant(model.key, generation or "")
    processor = dispatcher.processors.get(variant)
    workers: Iterable[ReplicaWorker] = processor.replicas if processor else ()
    running = {worker.id: job.id for worker in workers for job in worker.runs[:1]}
    return ModelState(
        model_key=str(key),
        repo_id=key.repo_id,
        revision=key.revision,
        task=key.task,
        generation=generation,
        metrics_label=MODELS.of(key.label),
        dedicated=model.dedicated,
        size_bytes=controller.size_of(variant),
        desired_replicas=processor.desired_replicas if processor else model.deployment.replicas,
        processor=_processor_status(controller, processor),
        waiting=len(processor.queue) if processor else 0,
        problem=model.problems.get(generation or ""),
        probe=histories.for_operator(Target.of(key, generation or "")),
        replicas=[
            _replica(replica, running.get(replica.placed.replica_id))
            for replica in replicas
            if replica.generation == generation
        ],
    )


def _processor_status(
    controller: Controller, processor: Processor | None
) -> ProcessorStatus | None:
    """Return a processor's status: PROVISIONING also while requested replicas have no place yet."""
    if processor is None:
        return None
    is_sought = processor.variant in controller.undecided(processor.model)
    if is_sought and processor.status is ProcessorStatus.UNINITIALIZED:
        return ProcessorStatus.PROVISIONING
    return processor.status


def _replica(replica: Replica, request_id: str | None) -> ReplicaStatus:
    place = replica.placed
    is_warm = place.level is DeploymentLevel.WARM
    loaded, total = replica.progress or (None, None)
    return project(
        ReplicaStatus,
        place,
        state=place.level.value if is_warm else replica.state.value,
        gpu_mem_bytes_by_id={str(gpu): held for gpu, held in place.gpu_mem_bytes_by_id.items()},
        done=loaded,
        total=total,
        request_id=request_id,
    )


def queue_states(dispatcher: Dispatcher) -> Queues:
    """Return the running and waiting requests of every processor."""
    return Queues(models=[_queue(processor) for processor in dispatcher.processors.values()])


def _queue(processor: Processor) -> QueueState:
    key, wall = processor.model.config.key, _wall()
    return QueueState(
        model_key=str(key),
        repo_id=key.repo_id,
        generation=processor.variant.generation,
        processor=processor.status,
        running=[
            RunningRequest(
                request_id=job.id,
                user=job.user,
                replica_id=worker.id,
                since=wall + job.run_since,
            )
            for worker in processor.replicas
            for job in worker.runs
        ],
        waiting=[
            WaitingRequest(
                request_id=job.id,
                user=job.user,
                position=position,
                received=job.arrived,
                expected_start_s=processor.expected_wait_s(position),
            )
            for job, position in processor.queue.positions()
        ],
    )


def queue_waits(dispatcher: Dispatcher) -> list[QueueWait]:
    """Return the waits of each queue, at a cost independent of the number of requests."""
    wall = _wall()
    waits = []
    for processor in dispatcher.processors.values():
        oldest = next(iter(processor.queue), None)
        dispatched = [wall + job.run_since for job in processor.replicas.runs]
        waits.append(
            QueueWait(
                label=processor.model.config.key.label,
                generation=processor.variant.generation,
                waiting=len(processor.queue),
                oldest=None if oldest is None else oldest.arrived,
                last_dispatched=max(dispatched, default=None),
            )
        )
    return waits


def _wall() -> float:
    """Return the Unix time at which the event loop's clock was 0."""
    return time.time() - asyncio.get_running_loop().time()


def unfinished_jobs(dispatcher: Dispatcher, user: str | None) -> list[JobState]:
    """Return the unfinished jobs of a user, or of all users for None, newest first."""
    places: dict[str, tuple[int, float | None]] = {}
    for processor in dispatcher.processors.values():
        for job, position in processor.queue.positions():
            places[job.id] = position, processor.expected_wait_s(position)
    jobs = []
    for job in dispatcher.lifecycle.unfinished():
        if user not in (None, job.user):
            continue
        place = places.get(job.id)
        jobs.append(
            project(
                JobState,
                job.request,
                model=job.request.model.repo_id,
                status=job.state,
                dispatched=job.dispatched,
                ended=None,
                position=None if place is None else place[0],
                expected_start_s=None if place is None else place[1],
            )
        )
    return sorted(jobs, key=lambda job: -float(job.received or 0))


def trace_of(request: Request, status: Status, steps: Iterable[Step]) -> Trace:
    """Return the trace of an unfinished job."""
    return project(
        Trace,
        request,
        model=request.model.repo_id,
        status=status,
        reason="",
        ended=None,
        steps=TraceStep.of(steps),
    )
