"""The state of a server for its dashboard; the public part names no user, job or key."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ndif.cluster.controller import Controller
from ndif.cluster.replica import Replica
from ndif.cluster.status import client_status
from ndif.control.reconciler import Reconciler
from ndif.control.state import (
    current_problems,
    model_states,
    node_states,
    sentences,
    unfinished_jobs,
)
from ndif.probe.history import Histories
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor
from ndif.schema.answer import project, to_json
from ndif.schema.client_status import ModelStatus
from ndif.schema.job_state import OwnJob
from ndif.schema.public_state import (
    Held,
    JobHistory,
    NextState,
    PublicState,
    ShownGeneration,
    ShownGpu,
    ShownInterval,
    ShownMemory,
    ShownModel,
    ShownNode,
    ShownReplica,
    ShownWindow,
)
from ndif.schema.server_state import ModelState
from ndif.schema.states import DeploymentLevel
from ndif.stores.usage import Interval, UsageStore, UsageUnavailableError, percentile

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Seconds after which a call for a new state returns without one."""
_INTERVAL_S = 1.0
"""Minimum seconds between two snapshots of the server."""
_SNAPSHOT_COST = 50
"""Seconds between snapshots for each second that a snapshot takes, which limits them to 2 % of a core."""
_HISTORY_S = 6 * 3600.0
"""Seconds of history shown."""
STEP_S = 300.0
"""Length of an interval of the history, in seconds."""
_READ_S = 15.0
"""Seconds between two reads of the record of jobs."""
_DIGITS = 12
"""Hexadecimal digits of a state's name."""


@dataclass(eq=False)
class Overview:
    """Takes snapshots of a server on demand; all viewers share them.

    The controller, the queues and the calendar are read in memory. The record of jobs is read every 15 s
    at most, and only for intervals that may have changed.
    """

    controller: Controller
    dispatcher: Dispatcher
    reconciler: Reconciler
    usage: UsageStore
    histories: Histories
    protected_s: float
    """Seconds for which a replica, once HOT, is evicted only for a dedicated model."""
    now: Callable[[], float] = time.time
    _state: PublicState | None = field(default=None, init=False)
    _name: str = field(default="", init=False)
    _jobs: Mapping[str, list[OwnJob]] | None = field(default=None, init=False)
    _next_snapshot_at: float = field(default=0.0, init=False)
    _intervals: dict[float, Interval] = field(default_factory=dict, init=False)
    _next_read_at: float = field(default=0.0, init=False)
    _wall: float | None = field(default=None, init=False)
    """Unix time at which the event loop's clock was 0. Taken once: a new value would shift shown times."""
    _reading: asyncio.Task[None] | None = field(default=None, init=False)

    async def next(self, last_name: str = "", users: Sequence[str] = ()) -> NextState:
        """Return the state and these users' unfinished jobs, once their name differs from `last_name`.

        `last_name` is the name in an earlier answer. After `PATIENCE_S`, the answer has only the name.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        while True:
            self._take_snapshot()
            jobs = self._jobs_by_user(users)
            name = f"{self._name}-{_digest(jobs)}"
            if name != last_name:
                return NextState(name=name, state=self._state, jobs=jobs)
            left_s = until - loop.time()
            if left_s <= 0:
                return NextState(name=name)
            await asyncio.sleep(min(left_s, max(0.01, self._next_snapshot_at - loop.time())))

    def _take_snapshot(self) -> None:
        """Take a snapshot, unless the last one is recent."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._next_snapshot_at:
            return
        began = time.perf_counter()
        self._read_history()
        self._state = self._describe()
        self._name = _digest(self._state)
        self._jobs = None
        took_s = time.perf_counter() - began
        self._next_snapshot_at = loop.time() + max(_INTERVAL_S, _SNAPSHOT_COST * took_s)

    def _jobs_by_user(self, users: Sequence[str]) -> dict[str, list[OwnJob]]:
        """Return the unfinished jobs of these users, by user; the jobs are read once per snapshot."""
        if not users:
            return {}
        if self._jobs is None:
            began = time.perf_counter()
            jobs: dict[str, list[OwnJob]] = defaultdict(list)
            for job in unfinished_jobs(self.dispatcher, None):
                start_s = job.expected_start_s
                start_s = None if start_s is None else _rounded(start_s)
                jobs[job.user].append(replace(job.own, expected_start_s=start_s))
            self._jobs = jobs
            self._next_snapshot_at += _SNAPSHOT_COST * (time.perf_counter() - began)
        return {user: self._jobs[user] for user in users if user in self._jobs}

    def _describe(self) -> PublicState:
        now = self.now()
        if self._wall is None:
            self._wall = now - asyncio.get_running_loop().time()
        coming = self.reconciler.coming()
        entries = client_status(self.controller, coming, self.histories).deployments
        rows: dict[str, list[ModelState]] = defaultdict(list)
        for row in model_states(self.controller, self.dispatcher):
            rows[row.model_key].append(row)
        distinct = {id(entry): entry for entry in entries.values()}
        processors = {
            (str(processor.model.config.key), processor.variant.generation): processor
            for processor in self.dispatcher.processors.values()
        }
        ends = {w.config.repo_id: w.end.timestamp() for w in coming if w.start.timestamp() <= now}
        return PublicState(
            models=[
                self._model(entry, rows[entry.model_key], processors, ends)
                for entry in distinct.values()
            ],
            nodes=self._nodes(),
            problems=sentences(current_problems(self.controller)),
            schedule=[
                ShownWindow(
                    model=window.config.repo_id,
                    title=window.event,
                    start=window.start.timestamp(),
                    end=window.end.timestamp(),
                )
                for window in coming
            ],
            history=self._history(now),
        )

    def _model(
        self,
        entry: ModelStatus,
        rows: Sequence[ModelState],
        processors: Mapping[tuple[str, str], Processor],
        ends: Mapping[str, float],
    ) -> ShownModel:
        """Return one model, with its entry in `/status`, its replicas and its queues."""
        hot = [
            replica.deployed
            for row in rows
            for replica in row.replicas
            if replica.level is DeploymentLevel.HOT
        ]
        is_dedicated = bool(entry.dedicated)
        protected = max(hot) + self.protected_s if hot and not is_dedicated else None
        # A server of one model does not measure it and has a placeholder for the size.
        sizes = [row.size_bytes for row in rows if (row.size_bytes or 0) > 1]
        generations = [
            _generation(
                row,
                row.generation,
                processors.get((row.model_key, row.generation)),
                self._wall or 0.0,
            )
            for row in rows
            if row.generation is not None
        ]
        used = [
            generation.last_used for generation in generations if generation.last_used is not None
        ]
        return project(
            ShownModel,
            entry,
            key=entry.model_key,
            level=entry.deployment_level,
            state=entry.state.value,
            dedicated=is_dedicated,
            size_bytes=max((size for size in sizes if size is not None), default=None),
            protected_until=ends.get(entry.repo_id, protected),
            last_used=max(used, default=None),
            problems=list(dict.fromkeys(row.problem for row in rows if row.problem)),
            probes=entry.probes or {},
            generations=generations,
        )

    def _nodes(self) -> list[ShownNode]:
        """Return the nodes, with the memory that each replica holds."""
        by_node: dict[str, list[Replica]] = defaultdict(list)
        for replica in self.controller.replicas():
            by_node[replica.placed.node_id].append(replica)
        return [
            ShownNode(
                id=node.id,
                name=node.name,
                cpu=project(ShownMemory, node.cpu, held=_held(by_node[node.id], None)),
                gpus=[
                    project(ShownGpu, gpu, held=_held(by_node[node.id], index))
                    for index, gpu in enumerate(node.gpus)
                ],
            )
            for node in node_states(self.controller)
        ]

    def _history(self, now: float) -> JobHistory:
        """Return the history of jobs over the last hours, without intervals that had no jobs."""
        since = (now - _HISTORY_S) // STEP_S * STEP_S
        self._intervals = {s: interval for s, interval in self._intervals.items() if s >= since}
        return JobHistory(
            since=since,
            step_s=STEP_S,
            intervals=[_interval(self._intervals[start]) for start in sorted(self._intervals)],
        )

    def _read_history(self) -> None:
        """Start a task that reads the record of jobs, if a read is due."""
        loop = asyncio.get_running_loop()
        if self._reading is None and loop.time() >= self._next_read_at:
            self._next_read_at = loop.time() + _READ_S
            self._reading = asyncio.create_task(self._read(), name="history of jobs")

    async def _read(self) -> None:
        since = (self.now() - _HISTORY_S) // STEP_S * STEP_S
        if self._intervals:  # jobs of the last two intervals may still be recorded
            since = max(since, max(self._intervals) - STEP_S)
        try:
            for interval in await self.usage.history(since, STEP_S):
                self._intervals[interval.start] = interval
        except UsageUnavailableError as error:
            logger.warning("the dashboard has no history of jobs: %s", error)
        except Exception:
            logger.exception("the dashboard has no history of jobs")
        finally:
            self._reading = None


def _generation(
    row: ModelState, generation: str, processor: Processor | None, wall: float
) -> ShownGeneration:
    """Return a model's replicas and queue in one generation, without users."""
    waits_s = processor.expected_wait_s(row.waiting + 1) if processor else None
    oldest = next(iter(processor.queue), None) if processor else None
    used = processor.last_used if processor else None
    return ShownGeneration(
        generation=generation,
        processor=None if row.processor is None else row.processor.value,
        desired=row.desired_replicas,
        waiting=row.waiting,
        oldest=None if oldest is None else oldest.arrived,
        running=len(processor.replicas.runs) if processor else 0,
        wait_s=None if waits_s is None else _rounded(waits_s),
        last_used=None if used is None else round(wall + used, 1),
        replicas=[
            project(
                ShownReplica,
                replica,
                id=replica.replica_id,
                node=replica.node_id,
                busy=replica.request_id is not None,
            )
            for replica in row.replicas
        ],
    )


def _held(replicas: Iterable[Replica], gpu: int | None) -> list[Held]:
    """Return the bytes of GPU memory that each replica holds; of CPU memory if `gpu` is None."""
    entries = []
    for replica in replicas:
        place = replica.placed
        held = place.cpu_bytes if gpu is None else place.gpu_mem_bytes_by_id.get(gpu, 0)
        if held:
            name = replica.model.config.repo_id
            entries.append(
                Held(model=name, replica=place.replica_id, level=place.level, bytes=held)
            )
    return entries


def _interval(interval: Interval) -> ShownInterval:
    total_s, wait_s = _quartiles(interval.totals), _quartiles(interval.waits)
    return project(ShownInterval, interval, total_s=total_s, wait_s=wait_s)


def _quartiles(classes: Mapping[int, int]) -> list[float] | None:
    """Return the median and the 95th percentile; None without jobs."""
    percentiles = [percentile(classes, share) for share in (0.5, 0.95)]
    return [_rounded(seconds) for seconds in percentiles if seconds is not None] or None


def _rounded(seconds: float) -> float:
    """Round to two significant digits, the precision of an estimate; the value then changes less often."""
    return float(f"{seconds:.2g}")


def _digest(value: Any) -> str:
    return hashlib.sha256(to_json(value)).hexdigest()[:_DIGITS]
