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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ndif.runtime import progress
from ndif.runtime.cached import Cached
from ndif.runtime.frames import Channel
from ndif.runtime.generations import Generation, adapter
from ndif.runtime.memory import limit
from ndif.runtime.placing import place
from ndif.runtime.seal import Seal
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import sentence
from ndif.runtime.weights import Export, Exported, Placement, collect, install
from ndif.runtime.zygote import describe


@dataclass(frozen=True, slots=True)
class Owned:
    """What an owner tells of the model that it loaded."""

    model: dict[str, Any]
    load_s: float
    placement: Placement
    weights: Exported


def own(channel: Channel, spec: ModelSpec, generation: Generation, export: Export) -> None:
    """Load the model, and keep its weights until the zygote is gone, or wants them in the CPU's memory."""

    def load() -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        generation.load(spec)
        load_s = time.perf_counter() - started
        return describe(generation.model, spec), load_s

    _own(channel, spec, generation, export, load)


def own_again(
    channel: Channel,
    spec: ModelSpec,
    generation: Generation,
    export: Export,
    cached: Cached,
    fd: int,
    before: Owned,
) -> None:
    """As `own`, but of weights that an owner `before` left in the memory behind `fd`.

    It is another process than that one, because what CUDA itself takes of a GPU it gives back with the
    process alone; and so does memory that was exported.
    """

    def load() -> tuple[dict[str, Any], float]:
        module = generation.model._module
        install(module, cached.tensors(fd))
        os.close(fd)
        place(module, spec)
        return {**before.model, "device": str(module.device)}, before.load_s

    _own(channel, spec, generation, export, load)


def _own(
    channel: Channel,
    spec: ModelSpec,
    generation: Generation,
    export: Export,
    load: Callable[[], tuple[dict[str, Any], float]],
) -> None:
    """Have the weights, tell the zygote where they are, and do with them what it asks."""
    torch.set_num_threads(spec.threads or os.cpu_count() or 1)
    progress.report(
        lambda done, total: channel.send({"kind": "progress", "done": done, "total": total})
    )
    try:
        limit(spec.max_memory)
        model, load_s = load()
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
        owned = Owned(model, load_s, Placement.of(module), weights)
    except Exception as error:
        traceback.print_exc()
        channel.send({"kind": "failed"}, sentence(error).encode())
        return
    channel.send({"kind": "owned"}, pickle.dumps(owned))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            header, _, _ = channel.receive()
            changed = seal.broken(held) if seal is not None else []
            if changed:
                restore(held, changed, spec)
            if header["kind"] == "verify":
                channel.send({"kind": "verified", "restored": len(changed)})
            elif header["kind"] == "cache":
                cached = Cached.of(held)
                channel.send({"kind": "cached"}, pickle.dumps(cached), [cached.fill(held)])
                return


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
