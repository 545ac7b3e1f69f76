"""How and where every generation loads its weights."""

from __future__ import annotations

import os
from typing import Any

import torch

from ndif.runtime.spec import ModelSpec

_MOST_DEVICES = 255


def load_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of `from_pretrained` that `spec` asks for."""
    arguments: dict[str, Any] = {"dtype": spec.dtype}
    device = spec.device or ("auto" if torch.cuda.is_available() else None)
    if device == "auto" and spec.max_memory:
        first, *more = spec.max_memory
        if more:
            arguments["max_memory"] = dict(spec.max_memory)
        else:
            device = f"cuda:{first}"
    if device is not None and device != "cpu":
        arguments["device_map"] = device
    if spec.trust_remote_code:
        arguments["trust_remote_code"] = True
    return arguments


def on_cuda(spec: ModelSpec) -> bool:
    """Whether the weights belong on CUDA devices.

    From here on this process sees no such device where they do not, and never starts CUDA where they do.

    Raises:
        ValueError: if they do and there is no such device.
    """
    named = spec.device is not None and spec.device.startswith("cuda")
    anywhere = spec.device in (None, "auto")
    given = sorted(spec.max_memory or ()) if anywhere else []
    count = _count_devices() if named or anywhere else 0
    if (named or given) and count == 0:
        where = spec.device if named else f"GPU {given[0]}"
        raise ValueError(
            f"The model is to be on {where}, but torch {torch.__version__} finds no CUDA device here"
        )
    if given and given[-1] >= count:
        raise ValueError(
            f"The model is to be on GPU {given[-1]}, but torch finds {count} CUDA devices here, "
            "counted from 0"
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
