"""The owner: the process that holds a model's weights on GPUs.

CUDA does not survive a fork. So a zygote, which is there to be forked, never starts it and has the model
without weights; the owner, forked before all else, loads them; and a runner maps them once it has started
CUDA for itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from ndif.runtime import progress
from ndif.runtime.frames import Channel
from ndif.runtime.generations import Generation
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import sentence
from ndif.runtime.weights import Export, Exported, Placement, collect
from ndif.runtime.zygote import describe


@dataclass(frozen=True, slots=True)
class Owned:
    """What an owner tells of the model that it loaded."""

    model: dict[str, Any]
    load_s: float
    placement: Placement
    weights: Exported


def own(channel: Channel, spec: ModelSpec, generation: Generation, export: Export) -> None:
    """Load the model, tell the zygote where the weights are, and keep them until it is gone."""
    torch.set_num_threads(spec.threads or os.cpu_count() or 1)
    progress.report(
        lambda done, total: channel.send({"kind": "progress", "done": done, "total": total})
    )
    try:
        started = time.perf_counter()
        generation.load(spec)
        load_s = time.perf_counter() - started
        gc.collect()
        torch.cuda.empty_cache()
        module = generation.model._module
        # Once, not once a runner: each time, torch puts another layer around the memory, and frees it
        # only with the memory. The counter in a handle says when that may be, which is never here, so
        # all runners can do with the same handles, and one that is killed leaves nothing behind.
        weights = Exported.of(collect(module), export)
        owned = Owned(describe(generation.model, spec), load_s, Placement.of(module), weights)
    except Exception as error:
        traceback.print_exc()
        channel.send({"kind": "failed"}, sentence(error).encode())
        return
    channel.send({"kind": "owned"}, pickle.dumps(owned))
    with contextlib.suppress(EOFError, ConnectionError):
        channel.receive()
