"""The specification of the model that a model process loads."""

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
    """The limits of untrusted requests, which run in confined processes."""

    sandbox: Mode
    protector: bool
    whitelist: str | None
    """A file that lists further modules that untrusted code may import."""
    memory_bytes: int
    result_bytes: int
    max_threads: int
    adapters: str
    """The cache of adapters that untrusted requests may name."""
    scope: Literal["request", "user"] = "request"
    """`request`: a process for each request; `user`: a process for all requests of one key."""
    every_request: bool = False
    """True if no request is trusted; then the process that forks runners is confined as well."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model that one model process serves, and how it is loaded."""

    checkpoint: str
    """A repo id, or a local folder."""
    generation: str
    """The nnsight generation that loads the model, such as "0.8"."""
    revision: str | None = None
    task: str | None = None
    """The transformers task; None for the task of the checkpoint's architecture."""
    dtype: str = "auto"
    device: str | None = None
    """A torch device, "auto" to spread over GPUs, None for CUDA if available."""
    attn_implementation: str | None = None
    """The attention of requests that name none; None for the default of transformers."""
    threads: int = 0
    """Threads of a runner's tensor operations; 0 for one per core."""
    untrusted: UntrustedSettings | None = None
    """The limits of untrusted requests; None if every request is trusted."""
    trust_remote_code: bool = False
    """True to run Python code of the checkpoint while it is loaded."""
    pickled: bool = False
    """True to load pickled weights if the checkpoint has no others."""
    folder: str | None = None
    """The folder of a repository's files, once they are on this machine."""
    max_memory: Mapping[int, int] | None = None
    """Bytes that the model's tensors may take, by GPU index; None for no limit.

    The weights and the memory of runners share these bytes. CUDA contexts come on top.
    """

    @property
    def is_folder(self) -> bool:
        """Return True if the checkpoint is a local folder; the hub is then not contacted."""
        return Path(self.checkpoint).is_dir()

    @property
    def files(self) -> Path:
        """Return the folder of the checkpoint's files on this machine."""
        return Path(self.folder or self.checkpoint)
