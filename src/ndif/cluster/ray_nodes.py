"""A machine's memory as Ray's custom resources: declared at `ray start`, read by whoever places models.

Ray is told of it and places nothing by it: replicas ask for no resources, and say on which node they go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ndif.cluster.node import Node
from ndif.cluster.resources import Resources

HEAD: Mapping[str, int] = {"head": 1}
"""What the head of a cluster declares, beside what it offers to models, if it does."""

_CPU = "ndif_cpu_memory"
_GPU = "ndif_gpu_{}"
_CONTEXT = "ndif_gpu_context"
_UUID = re.compile(r"ndif_gpu_(\d+)_is_(.+)", re.ASCII)


def declaration(resources: Resources) -> dict[str, int]:
    """Declare the bytes that models may take of a node's CPU memory and GPUs, and which GPUs these are."""
    gpus = {_GPU.format(index): size for index, size in enumerate(resources.gpu_bytes)}
    # Of a custom resource Ray keeps a name and a number: the name has to say it.
    names = {
        f"{_GPU.format(index)}_is_{uuid}": 1
        for index, uuid in enumerate(resources.gpu_uuids)
        if uuid is not None
    }
    context = {_CONTEXT: resources.context_bytes} if resources.context_bytes else {}
    return {_CPU: resources.cpu_bytes, **gpus, **names, **context}


def resources_of(declared: Mapping[str, float]) -> Resources | None:
    """What a node that declared this offers to models; None where it offers nothing."""
    # What is nothing Ray does not list.
    gpus: list[int] = []
    while size := int(declared.get(_GPU.format(len(gpus)), 0)):
        gpus.append(size)
    cpu = int(declared.get(_CPU, 0))
    named = {int(found[1]): found[2] for name in declared if (found := _UUID.fullmatch(name))}
    uuids = [named.get(index) for index in range(len(gpus))]
    context = int(declared.get(_CONTEXT, 0))
    return Resources.of(gpus, cpu, 1.0, uuids, context) if cpu or gpus else None


def nodes_of(table: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Those of the nodes in `ray.nodes()` that live and take models."""
    living = (entry for entry in table if entry["Alive"])
    return [
        Node(entry["NodeID"], entry["NodeName"] or entry["NodeManagerAddress"], resources)
        for entry in living
        if (resources := resources_of(entry["Resources"])) is not None
    ]
