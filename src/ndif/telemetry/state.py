"""The server's state as metrics: nodes, models and queues, stores, and the disk of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from ndif.schema.server_state import ModelState, NodeState, ServerState
from ndif.telemetry.model_labels import OTHER

_MAX_MODELS = 500
_STATES = ("RUNNING", "DEPLOYING", "UNHEALTHY", "NOT DEPLOYED", "WARM")


def families(server: ServerState | None) -> Iterator[Metric]:
    """Yield the metrics of a server's state; None means that the server has no leader."""
    leads = GaugeMetricFamily("ndif_leader_up", "1 while the server has a leader and can run jobs.")
    leads.add_metric([], 0.0 if server is None else 1.0)
    yield leads
    if server is None:
        return
    yield from _nodes(server.nodes)
    yield from _models(server.models)
    problems = GaugeMetricFamily("ndif_problems", "Problems that `ndif status` shows.")
    problems.add_metric([], len(server.problems))
    yield problems


def stores(answers: Mapping[str, bool]) -> Iterator[Metric]:
    """Yield the metric that reports which stores answer a gateway."""
    up = GaugeMetricFamily(
        "ndif_store_up", "1 for a store that answers this gateway.", labels=["store"]
    )
    for store, does_answer in answers.items():
        up.add_metric([store], float(does_answer))
    yield up


def disk(usage: tuple[int, int] | None) -> Iterator[Metric]:
    """Yield the free and total bytes of the disk of results; nothing if they are unknown."""
    if usage is None:
        return
    free, total = usage
    family = GaugeMetricFamily(
        "ndif_disk_bytes", "Disk of results and large requests: total and free.", labels=["kind"]
    )
    family.add_metric(["total"], total)
    family.add_metric(["free"], free)
    yield family


def _nodes(nodes: list[NodeState]) -> Iterator[Metric]:
    gpu = GaugeMetricFamily(
        "ndif_gpu_memory_bytes",
        "Memory of a GPU: total, and free of replicas.",
        labels=["node", "gpu", "kind"],
    )
    withdrawn = GaugeMetricFamily(
        "ndif_gpu_withdrawn", "1 for a GPU that takes no models.", labels=["node", "gpu"]
    )
    cpu = GaugeMetricFamily(
        "ndif_cpu_memory_bytes",
        "CPU memory of a node for models: total, and free of replicas.",
        labels=["node", "kind"],
    )
    for node in nodes:
        name = node.name
        for index, gpu_state in enumerate(node.gpus):
            gpu.add_metric([name, str(index), "total"], gpu_state.bytes)
            gpu.add_metric([name, str(index), "free"], gpu_state.free_bytes)
            withdrawn.add_metric([name, str(index)], float(gpu_state.withdrawn))
        cpu.add_metric([name, "total"], node.cpu.bytes)
        cpu.add_metric([name, "free"], node.cpu.free_bytes)
    yield from (gpu, withdrawn, cpu)


def _models(models: list[ModelState]) -> Iterator[Metric]:
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
    probed = GaugeMetricFamily(
        "ndif_probe_up", "1 if the last probe of a model succeeded.", labels=labels
    )
    for label, group in _by_label(models).items():
        members = [replica for model in group for replica in model.replicas]
        waiting.add_metric(label, sum(model.waiting for model in group))
        running.add_metric(label, sum(replica.request_id is not None for replica in members))
        desired.add_metric(label, sum(model.desired_replicas for model in group))
        memory.add_metric(
            label, sum(sum(replica.gpu_mem_bytes_by_id.values()) for replica in members)
        )
        states = Counter(replica.state for replica in members)
        for state in _STATES:
            replicas.add_metric([*label, state], states[state])
        up = [model.probe.up for model in group if model.probe and model.probe.up is not None]
        if up:  # an unprobed model has no sample
            probed.add_metric(label, float(all(up)))
    yield from (waiting, running, replicas, desired, memory, probed)


def _by_label(models: Iterable[ModelState]) -> dict[tuple[str, str], list[ModelState]]:
    """Group models by label; beyond `_MAX_MODELS` labels, all other models share one label."""
    groups: dict[tuple[str, str], list[ModelState]] = {}
    for model in models:
        label = model.metrics_label, model.generation or ""
        has_label = OTHER not in label and (label in groups or len(groups) < _MAX_MODELS)
        groups.setdefault(label if has_label else (OTHER, ""), []).append(model)
    return groups
