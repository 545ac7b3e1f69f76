"""A complete request that a process runs before the first request of a client.

The first request of a process imports modules, builds kernels and maps memory; a warm-up request in the
zygote does all that for its forks. A forward pass alone does not warm up nnsight's unpickling, compiling
and interleaving, nor torch's writing of a result. These steps cost a fresh process as much again as the
pass.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from ndif.runtime.generations import ClientStream, Generation
from ndif.runtime.results import Result
from ndif.runtime.tracebacks import sentence

if TYPE_CHECKING:
    from ndif.sandbox.protector import Protector

_TOKENS = 16
_INCOMPLETE_INPUT = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    RuntimeError,
)
"""Errors of a forward pass that needs more inputs. Device errors only appear on synchronization."""
_PARALLEL_NUMEL = 1 << 18
"""Elements of a tensor large enough for torch to split it among its threads."""


def warm_up(model: Any) -> None:
    """Run a few tokens, so that the first forward pass of a request finds modules and kernels ready."""
    # A model that needs other inputs than tokens is served without a warm-up.
    with contextlib.suppress(Exception):
        _run_tokens(model)


def warm_up_on_device(model: Any) -> None:
    """Run a few tokens after the start of CUDA, so that CUDA loads its lazy libraries.

    Errors of a model that needs other inputs are ignored; errors of the device are raised.
    """
    try:
        _run_tokens(model)
    except torch.OutOfMemoryError:
        raise
    except _INCOMPLETE_INPUT:
        return


def _run_tokens(model: Any) -> None:
    embedding = getattr(model._module, "get_input_embeddings", lambda: None)()
    if isinstance(embedding, torch.nn.Embedding):
        tokens = torch.zeros((1, _TOKENS), dtype=torch.long, device=embedding.weight.device)
        with torch.no_grad():
            model._module(input_ids=tokens)


def start_threads(count: int) -> int:
    """Start torch's threads, `count` or one for each CPU of this process, and return their number."""
    count = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    torch.zeros(_PARALLEL_NUMEL).add_(1)
    return count


_PROMPT = "The Eiffel Tower is in the city of"
_NO_CLIENT = ClientStream(send=lambda _: None, receive=lambda: b"")
_ANY_SIZE = 1 << 62


class WarmupRequest:
    """A repeatable request of the model's generation; if it is not possible, a forward pass replaces it."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._payload: bytes | None = None
        self._possible = True

    def run(self, policy: Protector | None = None) -> None:
        """Run the request in this process and clear its caches."""
        if not self._possible:
            warm_up(self._generation.model)
            return
        try:
            if self._payload is None:
                self._payload = self._generation.warmup_payload(self._prompt())
            saves = self._generation.run(self._payload, _NO_CLIENT, policy)
            Result(self._generation.export(saves), _ANY_SIZE, _ANY_SIZE).compressed()
        except Exception as error:
            # A text prompt does not suit every kind of model.
            self._possible = False
            print(f"the warm-up request failed: {sentence(error)}", file=sys.stderr)
            warm_up(self._generation.model)
        finally:
            self._generation.forget()

    def _prompt(self) -> str:
        tokenizer = getattr(self._generation.model, "tokenizer", None)
        mask = getattr(tokenizer, "mask_token", None)
        return f"{_PROMPT} {mask}" if mask else _PROMPT
