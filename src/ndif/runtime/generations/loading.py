"""How every generation loads its weights."""

from __future__ import annotations

from typing import Any

import torch

from ndif.runtime.spec import ModelSpec


def load_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of `from_pretrained` that `spec` asks for."""
    arguments: dict[str, Any] = {"dtype": spec.dtype}
    device = spec.device or ("auto" if torch.cuda.is_available() else None)
    if device is not None and device != "cpu":
        arguments["device_map"] = device
    return arguments
