"""A model in the CPU's memory onto its GPUs, by the same rules as one that is loaded there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import get_balanced_memory

from ndif.runtime.generations.loading import load_arguments
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights import WeightsError

_ELSEWHERE = ("cpu", "disk")


def place(module: Any, spec: ModelSpec) -> None:
    """Move a model to the devices that `spec` names; nowhere, where this machine has no GPU.

    Raises:
        WeightsError: if there is no room for it on them.
    """
    remove_hook_from_module(module, recurse=True)
    vars(module).pop("hf_device_map", None)
    arguments = load_arguments(spec)
    if "device_map" not in arguments:
        return
    devices = (
        spread(module, arguments.get("max_memory"))
        if arguments["device_map"] == "auto"
        else {"": torch.device(arguments["device_map"])}
    )
    dispatch_model(module, devices, skip_keys=module._skip_keys_device_placement)


def spread(module: Any, max_memory: Mapping[int, int] | None) -> dict[str, Any]:
    """What of a model goes where; `max_memory` are bytes by GPU, None for all that is free.

    Raises:
        WeightsError: if there is no room for all of it.
    """
    whole = list(module._no_split_modules or [])
    room = get_balanced_memory(
        module,
        max_memory=None if max_memory is None else dict(max_memory),
        no_split_module_classes=whole,
    )
    gpus = {device: size for device, size in room.items() if device not in _ELSEWHERE}
    found: dict[str, Any] = infer_auto_device_map(
        module, max_memory=gpus, no_split_module_classes=whole
    )
    left_out = sorted(name for name, device in found.items() if device in _ELSEWHERE)
    if left_out:
        raise WeightsError(
            f"There is no room on the devices for all of the model: {left_out[0] or 'it'} was left "
            "out. Give it more devices, or more of them."
        )
    return found
