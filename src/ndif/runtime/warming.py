"""What a first request would have to wait for, done before."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

_TOKENS = 16
_WANTS_MORE = (TypeError, ValueError, AttributeError, LookupError, AssertionError, RuntimeError)
"""Errors of a forward pass that was given too little. Those of a device show when it is waited for."""
_WORTH_SHARING = 1 << 18
"""Numbers that torch splits among its threads."""


def warm_up(model: Any) -> None:
    """Run a few tokens, so that what a first pass imports, builds and maps is there.

    In the zygote its runners share it; in a runner it also starts the thread pool.
    """
    # A model that wants more than tokens is served all the same.
    with contextlib.suppress(Exception):
        _run_tokens(model)


def warm_up_on_device(model: Any) -> None:
    """Run a few tokens where CUDA has just started, with all that it loads only then.

    Raises:
        Exception: any but those of a model that wants more than tokens: the device then lacks something.
    """
    try:
        _run_tokens(model)
    except torch.OutOfMemoryError:
        raise
    except _WANTS_MORE:
        return


def _run_tokens(model: Any) -> None:
    embedding = getattr(model._module, "get_input_embeddings", lambda: None)()
    if isinstance(embedding, torch.nn.Embedding):
        tokens = torch.zeros((1, _TOKENS), dtype=torch.long, device=embedding.weight.device)
        with torch.no_grad():
            model._module(input_ids=tokens)


def start_threads(count: int) -> int:
    """Start torch's threads, `count` or one for each CPU that this process may use; how many.

    A zygote keeps one thread, so that a fork loses none; the pool is each runner's own.
    """
    count = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    torch.zeros(_WORTH_SHARING).add_(1)
    return count
