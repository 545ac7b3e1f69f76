"""State as metrics: nodes, models and queues, stores, and a disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from ndif.schema.server_state import ModelState, NodeState, ServerState
from ndif.telemetry.metrics import OTHER

_MOST_MODELS = 500
_STATES = ("RUNNING", "DEPLOYING", "UNHEALTHY", "NOT DEPLOYED", "WARM")


def families(server: ServerState | None) -> Iterator[Metric]:
    """Yield the metrics of a server's state; None where no process of it leads."""
    leads = GaugeMetricFamily("ndif_leader_up", "1 while a process leads, and jobs can run.")
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
        "ndif_disk_bytes", "Disk of results and large requests: in all, and free.", labels=["kind"]
    )
    found.add_metric(["total"], total)
    found.add_metric(["free"], free)
    yield found


def _nodes(nodes: list[NodeState]) -> Iterator[Metric]:
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
        name = node.name
        for index, one in enumerate(node.gpus):
            gpu.add_metric([name, str(index), "total"], one.bytes)
            gpu.add_metric([name, str(index), "free"], one.free_bytes)
            withdrawn.add_metric([name, str(index)], float(one.withdrawn))
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
    for label, alike in _by_label(models).items():
        found = [replica for model in alike for replica in model.replicas]
        waiting.add_metric(label, sum(model.waiting for model in alike))
        running.add_metric(label, sum(replica.request_id is not None for replica in found))
        desired.add_metric(label, sum(model.desired_replicas for model in alike))
        memory.add_metric(label, sum(sum(each.gpu_mem_bytes_by_id.values()) for each in found))
        states = Counter(replica.state for replica in found)
        for state in _STATES:
            replicas.add_metric([*label, state], states[state])
        up = [each.probe.up for each in alike if each.probe and each.probe.up is not None]
        if up:  # a model that was not probed is not there
            probed.add_metric(label, float(all(up)))
    yield from (waiting, running, replicas, desired, memory, probed)


def _by_label(models: Iterable[ModelState]) -> dict[tuple[str, str], list[ModelState]]:
    """Return the models that share a label; beyond a number of labels, all others share one."""
    found: dict[tuple[str, str], list[ModelState]] = {}
    for model in models:
        label = model.label, model.generation or ""
        is_known = label in found or len(found) < _MOST_MODELS
        found.setdefault(label if is_known else (OTHER, ""), []).append(model)
    return found
