"""State as metrics: nodes, models and queues from the answer of `GET /admin/status`, stores, and a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from ndif.telemetry.metrics import OTHER

_MOST_MODELS = 500
_STATES = ("RUNNING", "DEPLOYING", "UNHEALTHY", "NOT DEPLOYED", "WARM")


def families(status: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Yield the metrics of a server's state; None where no process of it leads."""
    leads = GaugeMetricFamily("ndif_leader_up", "1 while a process leads, and jobs can run.")
    leads.add_metric([], 0.0 if status is None else 1.0)
    yield leads
    if status is None:
        return
    yield from _nodes(status["nodes"])
    yield from _models(status["models"])
    problems = GaugeMetricFamily("ndif_problems", "Problems that `ndif status` shows.")
    problems.add_metric([], len(status["problems"]))
    yield problems


def stores(answers: Mapping[str, bool]) -> Iterator[Metric]:
    """Yield the metric that says which stores answer a gateway."""
    up = GaugeMetricFamily(
        "ndif_store_up", "1 for a store that answers this gateway.", labels=["store"]
    )
    for store, does_answer in answers.items():
        up.add_metric([store], float(does_answer))
    yield up


def disk(usage: tuple[int, int] | None) -> Iterator[Metric]:
    """Yield the free and all bytes of the disk of results; nothing while it does not tell."""
    if usage is None:
        return
    free, total = usage
    found = GaugeMetricFamily(
        "ndif_disk_bytes",
        "Disk of results and large requests: in all, and free.",
        labels=["kind"],
    )
    found.add_metric(["total"], total)
    found.add_metric(["free"], free)
    yield found


def _nodes(nodes: list[Mapping[str, Any]]) -> Iterator[Metric]:
    gpu = GaugeMetricFamily(
        "ndif_gpu_memory_bytes",
        "Memory of a GPU: in all, and not given to a replica.",
        labels=["node", "gpu", "kind"],
    )
    withdrawn = GaugeMetricFamily(
        "ndif_gpu_withdrawn", "1 for a GPU that takes no models.", labels=["node", "gpu"]
    )
    cpu = GaugeMetricFamily(
        "ndif_cpu_memory_bytes",
        "Memory of a node for models: in all, and not given to a replica.",
        labels=["node", "kind"],
    )
    for node in nodes:
        name = str(node["name"])
        for index, one in enumerate(node["gpus"]):
            gpu.add_metric([name, str(index), "total"], one["bytes"])
            gpu.add_metric([name, str(index), "free"], one["free_bytes"])
            withdrawn.add_metric([name, str(index)], float(one["withdrawn"]))
        cpu.add_metric([name, "total"], node["cpu"]["bytes"])
        cpu.add_metric([name, "free"], node["cpu"]["free_bytes"])
    yield from (gpu, withdrawn, cpu)


def _models(models: list[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ["model", "generation"]
    waiting = GaugeMetricFamily("ndif_queue_depth", "Jobs that wait for a replica.", labels=labels)
    running = GaugeMetricFamily("ndif_jobs_running", "Jobs that replicas run.", labels=labels)
    replicas = GaugeMetricFamily(
        "ndif_replicas", "Replicas, by their state.", labels=[*labels, "state"]
    )
    desired = GaugeMetricFamily(
        "ndif_replicas_desired", "Replicas that the autoscaler or an operator wants.", labels=labels
    )
    memory = GaugeMetricFamily(
        "ndif_model_gpu_memory_bytes", "GPU memory that a model's replicas hold.", labels=labels
    )
    for (name, generation), each in _by_label(models).items():
        waiting.add_metric([name, generation], each["waiting"])
        running.add_metric([name, generation], each["running"])
        desired.add_metric([name, generation], each["desired"])
        memory.add_metric([name, generation], each["memory"])
        for state in _STATES:
            replicas.add_metric([name, generation, state], each[state])
    yield from (waiting, running, replicas, desired, memory, _probes(models))


def _probes(models: list[Mapping[str, Any]]) -> Metric:
    """Return which models answered their last probe; a model that was not probed is not there."""
    found = GaugeMetricFamily(
        "ndif_probe_up",
        "1 if the last probe of a model succeeded.",
        labels=["model", "generation"],
    )
    up: dict[tuple[str, str], bool] = {}
    for model in models:
        if (probe := model.get("probe")) is not None and probe["up"] is not None:
            label = _label(model)
            label = label if label in up or len(up) < _MOST_MODELS else (OTHER, "")
            up[label] = up.get(label, True) and probe["up"]
    for label, is_up in up.items():
        found.add_metric([*label], float(is_up))
    return found


def _label(model: Mapping[str, Any]) -> tuple[str, str]:
    revision = f"@{model['revision']}" if model["revision"] else ""
    return f"{model['repo_id']}{revision}", str(model["generation"] or "")


def _by_label(models: list[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the sums of models that share a label."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for model in models:
        label = _label(model)
        if label not in found and len(found) >= _MOST_MODELS:
            label = OTHER, ""
        names = ("waiting", "running", "desired", "memory", *_STATES)
        sums = found.setdefault(label, dict.fromkeys(names, 0.0))
        sums["waiting"] += model["waiting"]
        sums["desired"] += model["desired_replicas"]
        for replica in model["replicas"]:
            sums["running"] += replica["request_id"] is not None
            sums["memory"] += sum(replica["gpu_mem_bytes_by_id"].values())
            if replica["state"] in sums:
                sums[replica["state"]] += 1
    return found
