"""What a node has, and what of it is free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ndif.schema.quantities import size

_COUNT = re.compile(r"(?:(\d{1,6})\s*x\s*)?(.+)", re.ASCII | re.IGNORECASE)
_MOST_GPUS = 1024


def parse_gpus(text: str) -> tuple[int, ...]:
    """The memory of each GPU that `2x24GiB` or `1x80GiB,2x24GiB` declares. Nothing, or 0, declares none.

    Raises:
        ValueError: with a sentence for the operator, when it is no such declaration.
    """
    if text.strip() in ("", "0"):
        return ()
    gpus: list[int] = []
    for part in text.split(","):
        try:
            each, count = _declared(part.strip())
        except ValueError:
            each = count = 0
        if each < 1 or not 0 < count <= _MOST_GPUS - len(gpus):
            raise ValueError(
                f"{text[:200]!r} does not declare GPUs: {part.strip()[:200]!r} is not COUNTxMEMORY. "
                f"Write 2x24GiB, or 1x80GiB,2x24GiB; at most {_MOST_GPUS} altogether."
            )
        gpus += [each] * count
    return tuple(gpus)


def _declared(part: str) -> tuple[int, int]:
    """Bytes of each GPU, and how many."""
    found = _COUNT.fullmatch(part)
    if found is None:
        raise ValueError("there is nothing")
    return size(found[2]), int(found[1] or 1)


@dataclass(frozen=True, slots=True)
class Resources:
    """Memory of a node's GPUs, each by its index, and of its CPU."""

    gpu_bytes: tuple[int, ...]
    cpu_bytes: int
    """What WARM replicas, and those that run on the CPU, may take together."""
    free_gpu_bytes: tuple[int, ...]
    free_cpu_bytes: int
    gpu_uuids: tuple[str | None, ...]
    """The name of each GPU, wherever it is plugged in; None for one that is only declared."""
    context_bytes: int
    """Bytes that a replica takes of each of its GPUs beside its size: its processes' CUDA contexts."""
    withdrawn: frozenset[int] = field(default=frozenset(), compare=False)
    """GPUs that take nobody more, because they have failed. It is the same machine with and without."""

    @classmethod
    def of(
        cls,
        gpu_bytes: Iterable[int],
        cpu_memory_bytes: int,
        cache_percentage: float = 0.9,
        gpu_uuids: Iterable[str | None] = (),
        context_bytes: int = 0,
    ) -> Resources:
        """Of an empty node: of its CPU memory, a part is left to everything else."""
        gpus = tuple(gpu_bytes)
        uuids = tuple(gpu_uuids) or (None,) * len(gpus)
        cpu_bytes = int(cpu_memory_bytes * cache_percentage)
        if cpu_bytes < 0 or any(total < 1 for total in gpus):
            raise ValueError("A node's memory must be more than nothing.")
        if len(uuids) != len(gpus):
            raise ValueError(f"{len(gpus)} GPUs cannot have {len(uuids)} names.")
        return cls(gpus, cpu_bytes, gpus, cpu_bytes, uuids, context_bytes)

    def model_bytes(self, index: int) -> int:
        """Return the largest model, or part of one, that a GPU holds which is its own."""
        return max(0, self.gpu_bytes[index] - self.context_bytes)

    @property
    def all_model_bytes(self) -> int:
        """The largest model that all GPUs hold together."""
        indices = set(range(len(self.gpu_bytes))) - self.withdrawn
        return sum(self.model_bytes(index) for index in indices)

    def taken(self, gpus: Mapping[int, int], cpu_bytes: int) -> Resources:
        """What is left when these are taken.

        Raises:
            ValueError: if they are not there: a decision of ours was wrong.
        """
        return self._moved(gpus, cpu_bytes, -1)

    def given_back(self, gpus: Mapping[int, int], cpu_bytes: int) -> Resources:
        """What is there when these are given back.

        Raises:
            ValueError: if they were never taken.
        """
        return self._moved(gpus, cpu_bytes, 1)

    def _moved(self, gpus: Mapping[int, int], cpu_bytes: int, sign: int) -> Resources:
        free = list(self.free_gpu_bytes)
        for index, held in gpus.items():
            free[index] += sign * held
            if not 0 <= free[index] <= self.gpu_bytes[index]:
                raise ValueError(f"GPU {index} would have {free[index]} bytes free.")
        free_cpu = self.free_cpu_bytes + sign * cpu_bytes
        if not 0 <= free_cpu <= self.cpu_bytes:
            raise ValueError(f"{free_cpu} bytes of CPU memory would be free.")
        return replace(self, free_gpu_bytes=tuple(free), free_cpu_bytes=free_cpu)

    def emptied(self) -> Resources:
        """As if nobody held anything."""
        return replace(self, free_gpu_bytes=self.gpu_bytes, free_cpu_bytes=self.cpu_bytes)

    def describe(self) -> dict[str, Any]:
        """They, for JSON."""
        gpus = zip(self.gpu_bytes, self.free_gpu_bytes, self.gpu_uuids, strict=True)
        return {
            "gpus": [
                {
                    "bytes": total,
                    "free_bytes": free,
                    "uuid": uuid,
                    "withdrawn": index in self.withdrawn,
                }
                for index, (total, free, uuid) in enumerate(gpus)
            ],
            "gpu_context_bytes": self.context_bytes,
            "cpu": {"bytes": self.cpu_bytes, "free_bytes": self.free_cpu_bytes},
        }
