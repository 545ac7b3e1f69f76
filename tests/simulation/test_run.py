"""Simulations small enough to be computed by hand, and properties of all simulations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from ndif.schema.model_key import ModelKey
from ndif.schema.status import Status
from ndif.simulation import generate
from ndif.simulation.journal import Journal
from ndif.simulation.report import report
from ndif.simulation.run import run
from ndif.simulation.tables import show
from ndif.simulation.trace import TraceError, TraceRequest
from ndif.simulation.world import World, read
from tests.fuzzing import examples

ONE_GPU = """
nodes: [{gpus: 1x10GB, cpu_memory: 100GB}]
speeds: {start_up: 10s, load_bytes_per_s: 1GB, warm_bytes_per_s: 2GB, cache_bytes_per_s: 4GB}
autoscale: {max_replicas: 1}
models:
  org/a: {size: 8GB, padding_factor: 0.0, device: cuda}
  org/b: {size: 8GB, padding_factor: 0.0, device: cuda}
"""
HOUR_S = 3600.0


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_left_to_itself() -> Iterator[None]:
    """Disable the garbage collection before each simulation, which takes a third of a second in tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[run.__module__], "gc", Mock())
        yield


def asks(at: float, model: str, run_s: float = 1.0, **fields: object) -> TraceRequest:
    request = TraceRequest(at, ModelKey("a.B", f"org/{model}"), "ada", run_s)
    return replace(request, **fields)  # type: ignore[arg-type]


def simulated(text: str, *requests: TraceRequest, seed: int = 0) -> Journal:
    return run(read(text, "c.yaml"), requests, seed)


def waits(journal: Journal) -> list[float | None]:
    return [
        None if outcome.dispatched is None else round(outcome.dispatched - outcome.received, 6)
        for outcome in journal.outcomes
    ]


# Computed by hand


def test_first_request_waits_for_load_and_others_for_queue() -> None:
    journal = simulated(ONE_GPU, asks(0, "a", 5), asks(1, "a", 2), asks(100, "a", 3))
    assert waits(journal) == [18.0, 22.0, 0.0]
    assert [outcome.ended for outcome in journal.outcomes] == [23.0, 25.0, 103.0]
    assert {outcome.error for outcome in journal.outcomes} == {None}


def test_trace_times_are_relative_to_first_request() -> None:
    journal = simulated(ONE_GPU, asks(1.7e9, "a"), asks(1.7e9 + 50, "a"))
    assert waits(journal) == [18.0, 0.0]
    assert journal.ended_s == 51.0


def test_evicted_model_returns_from_cpu_memory() -> None:
    journal = simulated(
        ONE_GPU, asks(0, "a"), asks(2 * HOUR_S, "b"), asks(4 * HOUR_S, "a"), asks(4.1 * HOUR_S, "a")
    )
    # b: 2 s until a has left the GPU, 18 s to load. a: 2 s until b has left, 4 s to return.
    assert waits(journal) == [18.0, 20.0, 6.0, 0.0]
    overall = report(read(ONE_GPU, "c.yaml"), journal, 0)["overall"]
    assert (overall["cold_loads"], overall["warm_returns"]) == (2, 1)
    assert (overall["evicted_to_warm"], overall["evicted_to_cold"]) == (2, 0)
    assert overall["loading_s"] == 18 + 18 + 4


def test_evicted_model_without_cpu_memory_is_loaded_again() -> None:
    text = ONE_GPU.replace("cpu_memory: 100GB", "cpu_memory: 1GB")
    journal = simulated(text, asks(0, "a"), asks(2 * HOUR_S, "b"), asks(4 * HOUR_S, "a"))
    assert waits(journal) == [18.0, 18.0, 18.0]
    overall = report(read(text, "c.yaml"), journal, 0)["overall"]
    assert (overall["cold_loads"], overall["warm_returns"]) == (3, 0)
    assert (overall["evicted_to_warm"], overall["evicted_to_cold"]) == (0, 2)


def test_request_without_gpu_memory_is_refused_with_reason() -> None:
    journal = simulated(ONE_GPU, asks(0, "a"), asks(60, "b"), asks(70, "b"))
    assert waits(journal) == [18.0, None, None]
    summary = report(read(ONE_GPU, "c.yaml"), journal, 0)
    assert (summary["overall"]["refused"], summary["overall"]["completed"]) == (2, 1)
    (error,) = summary["errors"]
    assert error["requests"] == 2
    assert "org/a" in error["for_example"]
    assert "protected for another" in error["for_example"]


def test_simulation_may_end_at_time_zero() -> None:
    text = ONE_GPU.replace("1x10GB", "1x1GB")
    journal = simulated(text, asks(0, "a"))
    summary = report(read(text, "c.yaml"), journal, 0)
    assert (summary["trace"]["ended_s"], summary["overall"]["refused"]) == (0.0, 1)
    assert (summary["overall"]["wait_s"], summary["overall"]["gpus_held"]) == (None, None)
    show(summary, Console(), 5)


def test_dedicated_models_are_deployed_before_first_request() -> None:
    text = ONE_GPU.replace("org/a: {", "org/a: {dedicated: true, ")
    journal = simulated(text, asks(0, "b"), asks(10, "a"), asks(2 * HOUR_S, "a"))
    assert waits(journal) == [None, 8.0, 0.0]
    assert "dedicated" in (journal.outcomes[0].error or "")


def test_long_queue_adds_replicas() -> None:
    text = ONE_GPU.replace("1x10GB", "4x10GB").replace(
        "max_replicas: 1", "max_replicas: 4, target_wait: 30s, cooldown: 1m, idle: 10m"
    )
    crowd = [asks(number, "a", 20.0) for number in range(300)]
    many = simulated(text, *crowd)
    single = simulated(ONE_GPU, *crowd)
    key = next(iter(many.by_model))
    assert many.by_model[key].cold_loads == 4
    assert many.ended_s < single.ended_s / 2


def test_request_over_execution_timeout_is_ended() -> None:
    text = ONE_GPU + "rules: {execution_timeout: 1m}\n"
    journal = simulated(text, asks(0, "a", 61), asks(1, "a", 60))
    assert [outcome.ended for outcome in journal.outcomes] == [78.0, 138.0]
    first, second = (outcome.error for outcome in journal.outcomes)
    assert first == "The job ran longer than its limit of 1m."
    assert second is None
    assert report(read(text, "c.yaml"), journal, 0)["overall"]["failed"] == 1


def test_job_on_cpu_takes_longer() -> None:
    text = (
        ONE_GPU.replace("gpus: 1x10GB, ", "")
        .replace(", device: cuda", "")
        .replace("10s,", "10s, cpu_slowdown: 7.0,")
    )
    journal = simulated(text, asks(0, "a", 2))
    assert [outcome.ended for outcome in journal.outcomes] == [18.0 + 14.0]
    assert journal.outcomes[0].on_cpu
    overall = report(read(text, "c.yaml"), journal, 0)["overall"]
    assert (overall["gpu_utilisation"], overall["gpus_held"]) == (None, None)
    assert overall["cpu_memory_held"] == pytest.approx(8 / 90, abs=1e-5)


def test_priority_request_runs_first() -> None:
    journal = simulated(
        ONE_GPU,
        asks(0, "a", 5),
        asks(1, "a", 5, user="bo"),
        asks(2, "a", 5, user="cy", priority=True),
    )
    first, bo, cy = (outcome.dispatched or 0.0 for outcome in journal.outcomes)
    assert cy < bo
    assert {first, bo, cy} == {18.0, 23.0, 28.0}


def test_generations_have_separate_replicas() -> None:
    text = ONE_GPU.replace("1x10GB", "2x10GB")
    journal = simulated(text, asks(0, "a"), asks(100, "a", generation="0.7"))
    assert waits(journal) == [18.0, 18.0]
    rows = report(read(text, "c.yaml"), journal, 0)["models"]
    assert [(row["model"], row["generation"], row["cold_loads"]) for row in rows] == [
        ("org/a", "0.7", 1),
        ("org/a", "0.8", 1),
    ]


def test_report_gives_held_and_busy_gpu_shares() -> None:
    """A model holds one of two nodes' GPUs from the decision on, and is busy for a quarter of the time."""
    text = ONE_GPU.replace("nodes: [", "nodes: [{name: other, gpus: 1x1GB, cpu_memory: 1GB}, ")
    journal = simulated(text, asks(0, "a", 20), asks(62, "a", 2), asks(86, "a", 2))
    summary = report(read(text, "c.yaml"), journal, 0)
    assert summary["trace"]["ended_s"] == 88.0
    assert summary["overall"]["on_cpu"] == 0
    by_node = {row["node"]: row for row in summary["nodes"]}
    assert by_node["node-1"]["gpus_held"] == 1.0
    assert by_node["node-1"]["gpu_utilisation"] == round(24 / 88, 6)
    assert by_node["other"]["gpus_held"] == 0.0
    assert summary["overall"]["gpu_utilisation"] == round(12 / 88, 6)
    (row,) = summary["models"]
    assert row["busy_while_held"] == round(24 / 88, 6)
    assert summary["hours"][0]["gpu_utilisation"] == round(12 / 88, 6)


def test_fraction_of_gpu_counts_as_fraction() -> None:
    text = ONE_GPU.replace("org/a: {size: 8GB", "org/a: {size: 2GB")
    journal = simulated(text, asks(0, "a", 12))
    overall = report(read(text, "c.yaml"), journal, 0)["overall"]
    assert (overall["gpus_held"], overall["gpu_utilisation"]) == (0.2, 0.1)


def test_request_that_does_not_end_counts_as_unfinished() -> None:
    text = ONE_GPU + "rules: {execution_timeout: 30d}\n"
    journal = simulated(text, asks(0, "a"), asks(5, "a", 5 * 86400.0))
    assert [outcome.ended for outcome in journal.outcomes] == [19.0, None]
    assert report(read(text, "c.yaml"), journal, 0)["overall"]["unfinished"] == 1


def test_models_without_known_size_are_refused() -> None:
    with pytest.raises(TraceError, match=r"org/new, org/other\. Add them to models"):
        simulated(ONE_GPU, asks(0, "a"), asks(1, "other"), asks(1, "new"))
    journal = simulated(ONE_GPU + "default_size: 1GB\n", asks(0, "new"))
    assert waits(journal) == [10 + 1.15]


# Any simulation


def tight(names: list[str], gpus: int, memory: str = "64GiB") -> World:
    """Return a world with so little memory that models constantly evict each other."""
    text = generate.cluster(names, 0)
    for roomy, little in (
        ("count: 6", "count: 2"),
        ("8x80GiB", f"{gpus}x16GiB"),
        ("1TiB", memory),
        ("15m", "30s"),
    ):
        assert roomy in text
        text = text.replace(roomy, little)
    return read(text, "c.yaml")


def asked(names: list[str], requests: int, seed: int) -> list[TraceRequest]:
    """Return twenty minutes of requests."""
    return generate.trace(names, requests, seed, users=10, length_s=1200)


@settings(max_examples=examples(0.4))
@given(
    st.integers(0, 1000),
    st.integers(1, 20),
    st.integers(1, 100),
    st.integers(1, 3),
    st.sampled_from(["64GiB", "24GiB", "1TiB"]),
)
@example(
    285, 16, 62, 1, "64GiB"
)  # a request that loses its replica finds no free memory afterwards
def test_every_request_ends_once_and_figures_agree(
    seed: int, models: int, requests: int, gpus: int, memory: str
) -> None:
    the_numbers_agree(seed, models, requests, gpus, memory)


def the_numbers_agree(
    seed: int, models: int, requests: int, gpus: int, memory: str
) -> dict[str, Any]:
    """Simulate a world and check the general properties; return the overall figures."""
    names = generate.names(models)
    world = tight(names, gpus, memory)
    trace = asked(names, requests, seed)
    journal = run(world, trace, seed)
    summary = report(world, journal, seed)
    overall = summary["overall"]
    assert overall["requests"] == requests
    assert overall["completed"] + overall["refused"] + overall["failed"] == requests
    assert overall["unfinished"] == 0
    assert journal.statuses[Status.COMPLETED] == overall["completed"]
    runs = overall["completed"] + overall["failed"] + overall["interrupted"]
    assert journal.statuses[Status.DISPATCHED] == journal.statuses[Status.RUNNING] == runs
    for outcome in journal.outcomes:
        if outcome.dispatched is not None:
            assert outcome.dispatched >= outcome.received
            slowdown = world.speeds.cpu_slowdown if outcome.on_cpu else 1
            run_s = min(outcome.asked.run_s * slowdown, 3600)
            assert outcome.ended == pytest.approx(outcome.dispatched + run_s)
    for column in ("requests", "completed", "refused"):
        assert sum(row[column] for row in summary["models"]) == overall[column]
        assert sum(row["requests"] for row in summary["hours"]) == requests
    for column in ("cold_loads", "warm_returns", "evicted_to_warm", "dropped_from_warm"):
        for rows in (summary["models"], summary["nodes"]):
            assert sum(row[column] for row in rows) == overall[column]
    assert sum(error["requests"] for error in summary["errors"]) == requests - overall["completed"]
    if (
        overall["gpu_utilisation"] is None
    ):  # all requests were refused on arrival, so no time has passed
        assert overall["refused"] == requests
        return overall
    for row in (overall, *summary["nodes"], *summary["hours"]):
        assert 0 <= row["gpu_utilisation"] <= row["gpus_held"] + 1e-6
        assert row["gpus_held"] <= 1 + 1e-6
        assert 0 <= row["cpu_memory_held"] <= 1 + 1e-6
    assert overall["gpu_utilisation"] == pytest.approx(
        sum(row["gpu_utilisation"] for row in summary["models"]), abs=1e-6 * len(summary["models"])
    )
    return overall


def test_figures_agree_when_models_evict_each_other() -> None:
    overall = the_numbers_agree(2, 20, 100, 1, "64GiB")
    for figure in (
        *("completed", "refused", "interrupted", "on_cpu", "cold_loads", "warm_returns"),
        *("evicted_to_warm", "evicted_to_cold", "dropped_from_warm"),
    ):
        assert overall[figure] > 0, figure


def test_repeated_simulation_gives_same_report() -> None:
    names = generate.names(20)
    trace = asked(names, 100, 2)
    first, again = (report(tight(names, 1), run(tight(names, 1), trace, 7), 7) for _ in range(2))
    assert first == again
    assert first["overall"]["evicted_to_warm"] > 0
