"""The model that a model process is to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ndif.sandbox.confinement.confinement import Mode

CO_BATCHING = ("0.8",)
"""Generations that can run several traces in one forward pass."""


@dataclass(frozen=True, slots=True)
class UntrustedSettings:
    """Limits of untrusted requests, each of which runs in a confined process."""

    sandbox: Mode
    protector: bool
    whitelist: str | None
    """A file of further modules that untrusted code may import."""
    memory_bytes: int
    result_bytes: int
    max_threads: int
    adapters: str
    """The cache of adapters that untrusted requests may name."""
    scope: Literal["request", "user"] = "request"
    """`request`: a process a request; `user`: a process for one key's requests; `auto`: `user` on GPUs."""
    alone: bool = False
    """True if no request is trusted: then the process that forks runners is confined as well."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model in one runtime."""

    checkpoint: str
    """A repo id, or a local folder."""
    generation: str
    """The nnsight generation that must load it: "0.8"."""
    revision: str | None = None
    task: str | None = None
    """The transformers task; None: the task of the checkpoint's architecture."""
    dtype: str = "auto"
    device: str | None = None
    """A torch device, "auto" to spread over GPUs, None for CUDA where there is one."""
    attn_implementation: str | None = None
    """The attention of requests that name none; None: transformers' choice."""
    threads: int = 0
    """Threads of a runner's tensor operations; 0: one per core."""
    untrusted: UntrustedSettings | None = None
    """None: every request is trusted."""
    trust_remote_code: bool = False
    """True to run Python code of the checkpoint while it is loaded."""
    pickled: bool = False
    """True to load weights that are pickled, where the checkpoint has no others."""
    folder: str | None = None
    """The folder of a repository's files, once they are on this machine."""
    max_memory: Mapping[int, int] | None = None
    """Bytes that the model's tensors may take, by the index of each GPU; None: no limit.

    CUDA contexts come on top. The owner's weights and the runners' own memory share these bytes.
    """

    @property
    def is_folder(self) -> bool:
        """Return True if the checkpoint is a folder of this machine, for which no hub is asked."""
        return Path(self.checkpoint).is_dir()

    @property
    def files(self) -> Path:
        """Return the folder of the checkpoint's files on this machine."""
        return Path(self.folder or self.checkpoint)
