"""How and where every generation loads its weights."""

from __future__ import annotations

from typing import Any

from ndif.runtime.spec import ModelSpec


def load_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that `spec` asks for."""
    arguments: dict[str, Any] = {"dtype": spec.dtype}
    device = spec.device
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
