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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ndif.runtime import progress
from ndif.runtime.frames import Channel
from ndif.runtime.generations import Generation, adapter
from ndif.runtime.seal import Seal
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
        held = collect(module)
        weights = Exported.of(held, export)
        # Exported memory may be other memory than was collected.
        held = collect(module)
        seal = Seal.of(held) if spec.untrusted is not None else None
        owned = Owned(describe(generation.model, spec), load_s, Placement.of(module), weights)
    except Exception as error:
        traceback.print_exc()
        channel.send({"kind": "failed"}, sentence(error).encode())
        return
    channel.send({"kind": "owned"}, pickle.dumps(owned))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            channel.receive()
            changed = seal.broken(held) if seal is not None else []
            if changed:
                restore(held, changed, spec)
            channel.send({"kind": "verified", "restored": len(changed)})


def restore(held: Mapping[str, torch.Tensor], changed: list[str], spec: ModelSpec) -> None:
    """Write weights again as they are in the checkpoint, where others have them mapped."""
    progress.report(lambda *_: None)
    again = adapter(spec.generation)
    again.load(replace(spec, device="cpu"))
    pristine = collect(again.model._module)
    with torch.no_grad():
        for name in changed:
            held[name].copy_(pristine[name])
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
