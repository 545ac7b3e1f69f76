"""Several jobs at once, from a client that sends them without waiting."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import nnsight
from comparing import until
from nnsight import TransformersModel
from nnsight.schema.config import CONFIG

PROMPT = "The Eiffel Tower is in the city of"


class Context:
    """The model without weights."""

    def __init__(self, name: str, _: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        self.remote = TransformersModel(name, task="text-generation")


def runs_for(model: Any, seconds: float) -> Any:
    """Send a job that takes `seconds`, and saves its process and its times."""
    with model.trace(PROMPT, remote=True, blocking=False) as tracer:
        hidden = model.transformer.h[1].output.save()
        began = time.time()
        time.sleep(seconds)
        record = [os.getpid(), began, time.time()].save()
    return tracer.backend


def is_timed(model: Any, seconds: float) -> Any:
    """Send an untrusted job that takes `seconds`, and saves its times."""
    with model.trace(PROMPT, remote=True, blocking=False) as tracer:
        hidden = model.transformer.h[1].output.save()
        began = time.time()
        time.sleep(seconds)
        record = [began, time.time()].save()
    return tracer.backend


def results(jobs: list[Any]) -> list[dict[str, Any]]:
    """Return the saved values of jobs."""
    return [until(job) for job in jobs]


def scenario_two_run_side_by_side(context: Context) -> None:
    (shown,) = nnsight.status().deployments.values()
    assert shown["hot_replicas"] == 2
    first, second = (r["record"] for r in results([runs_for(context.remote, 2) for _ in range(2)]))
    assert first[0] != second[0]
    # Each began before the other ended.
    assert max(first[1], second[1]) < min(first[2], second[2])


def scenario_five_go_where_there_is_room(context: Context) -> None:
    records = [r["record"] for r in results([runs_for(context.remote, 0.5) for _ in range(5)])]
    processes = {pid for pid, _, _ in records}
    assert len(processes) == 2
    for pid in processes:
        turns = sorted((began, ended) for other, began, ended in records if other == pid)
        assert len(turns) >= 2
        # Each replica runs one job at a time.
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(turns))


def scenario_jobs_while_a_model_process_is_killed(context: Context) -> None:
    values = results([runs_for(context.remote, 3) for _ in range(4)])
    assert all(result["hidden"].shape[-1] == 64 for result in values)


def scenario_a_short_job(context: Context) -> None:
    results([runs_for(context.remote, 0.1)])


def scenario_three_untrusted_jobs_run_side_by_side(context: Context) -> None:
    records = [r["record"] for r in results([is_timed(context.remote, 3) for _ in range(3)])]
    assert max(began for began, _ in records) < min(ended for _, ended in records)


def scenario_untrusted_jobs_while_a_node_is_lost(context: Context) -> None:
    values = results([is_timed(context.remote, 3) for _ in range(5)])
    assert all(result["hidden"].shape[-1] == 64 for result in values)
