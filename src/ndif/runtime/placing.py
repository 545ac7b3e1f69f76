"""A model in the CPU's memory onto its GPUs, by the same rules as one that is loaded there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import get_balanced_memory

from ndif.runtime.driver import Driver
from ndif.runtime.generations.loading import load_arguments
from ndif.runtime.spec import ModelSpec
from ndif.runtime.transfer import to_devices
from ndif.runtime.weights import WeightsError, collect, install

_ELSEWHERE = ("cpu", "disk")


def place(module: Any, spec: ModelSpec, driver: Driver) -> None:
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
    move(module, devices, driver)
    # Nothing is left for it to move; it has values follow from device to device.
    dispatch_model(module, devices, skip_keys=module._skip_keys_device_placement)


def move(module: torch.nn.Module, devices: Mapping[str, Any], driver: Driver) -> None:
    """Copy the weights of a model to devices; tied ones stay tied.

    Args:
        devices: A device by the name of a submodule, for all that is in it.
    """
    weights = collect(module)
    moved: dict[int, torch.Tensor] = {}
    for name, tensor in weights.items():
        if id(tensor) not in moved:
            moved[id(tensor)] = _room_for(tensor, _device_of(name, devices))
    sources = {id(tensor): tensor for tensor in weights.values()}
    with torch.no_grad():
        to_devices(((moved[key], source) for key, source in sources.items()), driver)
    install(module, {name: moved[id(tensor)] for name, tensor in weights.items()})


def _room_for(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    room = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(room, requires_grad=tensor.requires_grad)
    return room


def _device_of(name: str, devices: Mapping[str, Any]) -> Any:
    """Return the device of the innermost submodule that `name` is in and that has one."""
    prefix = name
    while prefix not in devices and prefix:
        prefix = prefix.rpartition(".")[0]
    return devices[prefix]


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
