"""A complete request that a process runs before a client's first one.

The first request of a process imports modules, builds kernels and maps memory; a warm-up request in the
zygote does all that for its forks. A forward pass alone leaves out how nnsight unpickles, compiles and
interleaves, and how torch writes a result, which together cost a fresh process as much again.
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
"""Errors of a forward pass that needs more inputs. Errors of a device appear when it is synchronized."""
_PARALLEL_NUMEL = 1 << 18
"""Elements of a tensor that torch splits among its threads."""


def warm_up(model: Any) -> None:
    """Run a few tokens, so that a first forward pass finds its modules, kernels and memory ready."""
    # A model that needs more inputs than tokens is served all the same.
    with contextlib.suppress(Exception):
        _run_tokens(model)


def warm_up_on_device(model: Any) -> None:
    """Run a few tokens where CUDA has just started, and load the libraries that it loads lazily.

    Errors that a model raises because it needs more inputs are no errors of the device.
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
    """A request of the model's generation that can run any number of times.

    A model for which no such request can be made or run is warmed up by a forward pass alone.
    """

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
            # One prompt does not suit every kind of model, and every kind is to be served.
            self._possible = False
            print(f"the warm-up request failed: {sentence(error)}", file=sys.stderr)
            warm_up(self._generation.model)
        finally:
            self._generation.forget()

    def _prompt(self) -> str:
        tokenizer = getattr(self._generation.model, "tokenizer", None)
        mask = getattr(tokenizer, "mask_token", None)
        return f"{_PROMPT} {mask}" if mask else _PROMPT
