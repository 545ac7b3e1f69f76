"""Assignment of a node's GPUs to a replica.

A replica gets one of three kinds of assignment, from the least memory to the most:

- A *fraction* of one GPU, if `gpu_fraction_factor` models of its size would fit on the GPU. All fractions
  of a GPU take at most `fraction_largest_possible` of it. No fraction is added once less than
  `min_available_gpu_fraction` is free.
- One *whole* GPU, without other replicas. All its memory is reserved, even if the model needs less.
- *Several* whole GPUs, as few as suffice.

A GPU is therefore empty, shared, or owned by one replica, as its free memory shows. The first applicable
rule decides:

1. A fraction of an already shared GPU: the GPU with the least free memory.
2. The smallest empty GPU that holds the model: a fraction of it if the rules permit, else the whole GPU.
3. The fewest empty GPUs that hold the model together, and of these the smallest that suffice.

A GPU *holds* its memory minus the CUDA contexts of the replica's processes, which exist on each of the
replica's GPUs. A model's padding allows for layers, which cannot be split. A withdrawn GPU takes no
replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ndif.placement.demand import PlacementRules
from ndif.placement.resources import Resources


@dataclass(frozen=True, slots=True)
class Assignment:
    """The GPUs of a replica."""

    gpu_mem_bytes_by_id: Mapping[int, int]
    """Bytes reserved on each GPU, CUDA contexts included."""
    gpu_memory_fraction: float | None
    """Fraction of a shared GPU; None if the GPUs are not shared."""


def assign(resources: Resources, size_bytes: int, rules: PlacementRules) -> Assignment | None:
    """Return GPUs for a model of this size without evictions; None if the model does not fit."""
    return _assign_shared(resources, size_bytes, rules) or _assign_empty(
        resources, size_bytes, rules
    )


def _assign_shared(
    resources: Resources, size_bytes: int, rules: PlacementRules
) -> Assignment | None:
    need = size_bytes + resources.context_bytes
    shared = [
        (free, index)
        for index, (total, free) in enumerate(
            zip(resources.gpu_bytes, resources.free_gpu_bytes, strict=True)
        )
        if 0 < free < total
        and index not in resources.withdrawn
        and need <= rules.largest_share(total, free)
    ]
    return _fraction(resources, min(shared)[1], need) if shared else None


def _assign_empty(
    resources: Resources, size_bytes: int, rules: PlacementRules
) -> Assignment | None:
    totals = resources.gpu_bytes
    empty = [
        (resources.model_bytes(index), index)
        for index, total in enumerate(totals)
        if resources.free_gpu_bytes[index] == total and index not in resources.withdrawn
    ]
    single = min((gpu for gpu in empty if size_bytes <= gpu[0]), default=None)
    if single is None:
        indices = fewest(empty, size_bytes)
        return Assignment({index: totals[index] for index in indices}, None) if indices else None
    _, index = single
    need = size_bytes + resources.context_bytes
    if need <= rules.largest_share(totals[index], totals[index]):
        return _fraction(resources, index, need)
    return Assignment({index: totals[index]}, None)


def fewest(gpus: Iterable[tuple[int, int]], size_bytes: int) -> list[int]:
    """Choose the fewest GPUs that together hold a model, and of these the smallest that suffice.

    `gpus` are pairs of the bytes that a GPU holds and its index. Return an empty list if all GPUs together
    do not hold the model.
    """
    chosen: list[tuple[int, int]] = []
    left = sorted(gpus, key=lambda gpu: (-gpu[0], gpu[1]))
    held = 0
    while held < size_bytes:
        if not left:
            return []
        chosen.append(left.pop(0))
        held += chosen[-1][0]
    # Keep the number, but take smaller GPUs: large GPUs are more useful to other models.
    for position, gpu in enumerate(chosen):
        enough = (other for other in left if held - gpu[0] + other[0] >= size_bytes)
        smaller = min(enough, default=gpu)
        if smaller[0] < gpu[0]:
            chosen[position] = smaller
            held += smaller[0] - gpu[0]
            left.remove(smaller)
    return sorted(index for _, index in chosen)


def _fraction(resources: Resources, index: int, held: int) -> Assignment:
    return Assignment({index: held}, held / resources.gpu_bytes[index])


def largest_fit(resources: Resources, rules: PlacementRules, on_cpu: bool) -> int:
    """Return the size of the largest model that fits; on GPUs, that `assign` places."""
    if on_cpu:
        return resources.free_cpu_bytes
    empty = share = 0
    gpus = zip(resources.gpu_bytes, resources.free_gpu_bytes, strict=True)
    for index, (total, free) in enumerate(gpus):
        if index in resources.withdrawn:
            continue
        if free == total:
            empty += resources.model_bytes(index)
        elif free:
            share = max(share, rules.largest_share(total, free) - resources.context_bytes)
    # `PlacementRules` ensures that an empty GPU holds a larger model unshared than shared.
    return max(empty, share)
