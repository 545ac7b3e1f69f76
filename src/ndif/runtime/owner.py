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
from ndif.runtime.weights import Export, Exported, Placement, collect
from ndif.runtime.zygote import describe

_MOST_DEVICES = 255


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
        channel.send({"kind": "failed"}, f"{type(error).__name__}: {error}".encode())
        return
    channel.send({"kind": "owned"}, pickle.dumps(owned))
    with contextlib.suppress(EOFError, ConnectionError):
        channel.receive()


def on_cuda(spec: ModelSpec) -> bool:
    """Whether the weights belong on CUDA devices.

    From here on this process sees no such device where they do not, and never starts CUDA where they do.

    Raises:
        ValueError: if they do and there is no device.
    """
    named = spec.device is not None and spec.device.startswith("cuda")
    count = _count_devices() if named or spec.device in (None, "auto") else 0
    if named and count == 0:
        raise ValueError(
            f"The model is to be on {spec.device}, but torch {torch.__version__} finds no CUDA device here"
        )
    if count == 0:
        # A pipeline moves a model to the first GPU that there is, whatever it was told.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return False
    # Whoever asks torch gets this number, and torch starts nothing to find it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch.cuda._cached_device_count = count
    return True


def _count_devices() -> int:
    """How many CUDA devices there are.

    Another process counts: torch would start CUDA for it, unless NVML can tell, which knows nothing of
    the parts of a divided GPU and is missing in some containers.
    """
    if not torch.backends.cuda.is_built():
        return 0
    pid = os.fork()
    if pid == 0:
        count = 0
        try:
            if torch.cuda.is_available():
                count = min(torch.cuda.device_count(), _MOST_DEVICES)
        finally:
            os._exit(count)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
