"""What a model process is told to load, and what it says it loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ndif.sandbox.confinement import Mode


@dataclass(frozen=True, slots=True)
class Untrusted:
    """How code that nobody vouches for is run: each request in a process of its own, confined."""

    sandbox: Mode
    protector: bool
    whitelist: str | None
    """A file of further modules that such code may import."""
    memory_bytes: int
    result_bytes: int
    max_threads: int
    adapters: str
    """The cache of the adapters that such code may ask for."""
    scope: Literal["auto", "request", "user"] = "request"
    """`user`: a confined process serves one key's requests in a row; `auto`: on GPUs."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model in one runtime."""

    checkpoint: str
    """A repo id, or a local folder."""
    generation: str
    """The nnsight generation that must load it: "0.8"."""
    revision: str | None = None
    task: str | None = None
    """The transformers task; None: what the checkpoint's architecture says."""
    dtype: str = "auto"
    device: str | None = None
    """A torch device, "auto" to spread over GPUs, None for CUDA where there is one."""
    threads: int = 0
    """Threads of a runner's tensor operations; 0: one a core."""
    untrusted: Untrusted | None = None
    """None: whoever reaches this model is trusted."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the checkpoint is run when it is loaded."""
    max_memory: Mapping[int, int] | None = None
    """Bytes that its tensors may take of each GPU, by index, and of no other; None: what it likes.

    CUDA contexts are not among them. All processes of the replica share them: the weights, which the owner
    holds, and what its runners allocate.
    """

    @property
    def is_folder(self) -> bool:
        """Whether the checkpoint is here, and no hub is asked for it."""
        return Path(self.checkpoint).is_dir()

    def header(self) -> dict[str, Any]:
        """As a frame header's value."""
        return asdict(self)

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> ModelSpec:
        """Back from a frame header's value."""
        untrusted, memory = header["untrusted"], header["max_memory"]
        return cls(
            **{
                **header,
                "untrusted": untrusted and Untrusted(**untrusted),
                "max_memory": by_index(memory),
            }
        )


def by_index(memory: Mapping[Any, int] | None) -> dict[int, int] | None:
    """Bytes by GPU out of a frame's header, where JSON has made text of the numbers."""
    return None if memory is None else {int(index): size for index, size in memory.items()}
