"""The model process as it is for GPUs, an owner and its zygote, on a machine that has none.

Usage: owner_on_cpu.py FD FOLDER. All is as on GPUs but for two things: which devices a model goes to, and
how a tensor gets into another process; here it is a file in FOLDER that both map.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging

from ndif.runtime.weights import Export, Handle
from ndif.runtime.zygote import Zygote, main

FOLDER = Path(sys.argv[2])


def export(tensor: torch.Tensor) -> Handle:
    """Move `tensor` into shared memory, as it is with GPUs from the beginning."""
    if (FOLDER / "fatal").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    logging.tqdm(total=1).update()  # as a download tells how far it is
    descriptor, name = tempfile.mkstemp(dir=FOLDER)
    with os.fdopen(descriptor, "wb") as file:
        file.write(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    kind, dtype, shape, grad = type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad
    tensor.data = rebuild(name, torch.Tensor, dtype, shape, False)
    return rebuild, (name, kind, dtype, shape, grad)


def rebuild(
    name: str, kind: type, dtype: torch.dtype, shape: torch.Size, requires_grad: bool
) -> torch.Tensor:
    """The tensor in the file `name`."""
    memory = torch.from_file(name, shared=True, size=shape.numel(), dtype=dtype).view(shape)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(memory, requires_grad=requires_grad)
    return memory


class OwnedZygote(Zygote):
    """A zygote without weights."""

    def _export(self) -> Export | None:
        return export


if __name__ == "__main__":
    main(int(sys.argv[1]), OwnedZygote)
