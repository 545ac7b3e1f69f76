"""The books' entry for CUDA contexts: GPU memory that a process takes before its first tensor."""

from __future__ import annotations

from ndif.config import Settings

_OWNER = 1
_KEPT = 2
"""The runner that serves trusted requests, and the spare one behind it (`ndif.host.pool.Kept`)."""


def context_bytes(settings: Settings, *, untrusted: bool, trusted: bool) -> int:
    """Return the bytes that the processes of one replica take of each of its GPUs beside their tensors.

    Counts the owner of the weights, the runners that wait or run for untrusted requests, the one that a
    key has for itself, and those that are kept for trusted requests, where such may come.
    """
    held = settings.runner_scope != "request"
    runners = (settings.runner_pool + held) * untrusted + _KEPT * trusted
    return (_OWNER + runners) * settings.gpu_context_bytes
