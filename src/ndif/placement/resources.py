"""Memory of a node, in total and free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Resources:
    """Memory of a node's GPUs, by index, and of its CPU, in total and free."""

    gpu_bytes: tuple[int, ...]
    cpu_bytes: int
    """Bytes that WARM replicas and replicas on the CPU may take together."""
    free_gpu_bytes: tuple[int, ...]
    free_cpu_bytes: int
    gpu_uuids: tuple[str | None, ...]
    """UUID of each GPU, which stays with the card in any slot; None for a GPU that is only declared."""
    context_bytes: int
    """Bytes of each GPU that a replica takes in addition to its size, for its processes' CUDA contexts."""
    withdrawn: frozenset[int] = field(default=frozenset(), compare=False)
    """GPUs that take no more replicas because they failed; ignored when resources are compared."""

    @classmethod
    def of(
        cls,
        gpu_bytes: Iterable[int],
        cpu_memory_bytes: int,
        cache_percentage: float = 0.9,
        gpu_uuids: Iterable[str | None] = (),
        context_bytes: int = 0,
    ) -> Resources:
        """Return the resources of an empty node; a part of its CPU memory is left to other programs."""
        gpus = tuple(gpu_bytes)
        uuids = tuple(gpu_uuids) or (None,) * len(gpus)
        cpu_bytes = int(cpu_memory_bytes * cache_percentage)
        if cpu_bytes < 0 or any(total < 1 for total in gpus):
            raise ValueError(
                "A node's GPUs must have more than 0 bytes, and its CPU memory must not be negative."
            )
        if len(uuids) != len(gpus):
            raise ValueError(f"{len(gpus)} GPUs cannot have {len(uuids)} UUIDs.")
        return cls(gpus, cpu_bytes, gpus, cpu_bytes, uuids, context_bytes)

    def model_bytes(self, index: int) -> int:
        """Return the bytes of a model, or of a part of one, that a whole GPU holds."""
        return max(0, self.gpu_bytes[index] - self.context_bytes)

    @property
    def all_model_bytes(self) -> int:
        """Return the size of the largest model that all GPUs hold together, without withdrawn GPUs."""
        indices = set(range(len(self.gpu_bytes))) - self.withdrawn
        return sum(self.model_bytes(index) for index in indices)

    def taken(self, gpus: Mapping[int, int], cpu_bytes: int) -> Resources:
        """Return the resources with these bytes taken; raise a ValueError if they are not free."""
        return self._moved(gpus, cpu_bytes, -1)

    def given_back(self, gpus: Mapping[int, int], cpu_bytes: int) -> Resources:
        """Return the resources with these bytes free again; raise a ValueError if they were not taken."""
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
        """Return the resources with all memory free."""
        return replace(self, free_gpu_bytes=self.gpu_bytes, free_cpu_bytes=self.cpu_bytes)
