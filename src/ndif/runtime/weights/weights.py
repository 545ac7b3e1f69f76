"""A model's weights apart from its modules: they are collected, shared, placed and installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import get_balanced_memory
from transformers.utils import logging

from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import Progress
from ndif.runtime.process.cuda import Cuda, Handle
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.transfer import to_devices

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MAX_NAMED = 5
_HOOK_ARGUMENTS = ("execution_device", "io_same_device", "skip_keys")


class WeightsError(ValueError):
    """The weights of a model cannot be shared, placed or restored; the message is the reason."""


def load_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for `spec`."""
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
    if spec.attn_implementation is not None:
        arguments["attn_implementation"] = spec.attn_implementation
    # Always explicit: without this argument, transformers would prompt on the terminal.
    arguments["trust_remote_code"] = spec.trust_remote_code
    return arguments


def collect(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name; a tied tensor appears under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Return the tensors without duplicates, and each name's index among them; tied names share one."""
    unique = {id(tensor): tensor for tensor in tensors.values()}
    index = {key: number for number, key in enumerate(unique)}
    return list(unique.values()), {name: index[id(tensor)] for name, tensor in tensors.items()}


def check(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Raise WeightsError unless the tensors of `module` have exactly these names."""
    differing = sorted(collect(module).keys() ^ set(names))
    if differing:
        raise WeightsError(
            "The loaded model has other tensors than the model built from its config, so it cannot be "
            f"shared between processes: {', '.join(differing[:_MAX_NAMED])}"
        )


def install(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put collected tensors into a module of the same architecture; see `check`."""
    check(module, tensors)
    for name, tensor in tensors.items():
        path, _, key = name.rpartition(".")
        part = module.get_submodule(path)
        places = part._parameters if key in part._parameters else part._buffers
        places[key] = tensor  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """Handles of tensors, by which another process can map them."""

    names: Mapping[str, int]
    """The index in `handles` of each name; tied names share a handle."""
    handles: tuple[Handle, ...]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        export: Callable[[Iterable[torch.Tensor]], list[Handle]],
    ) -> ExportedWeights:
        """Export `tensors`, which must be kept while in use elsewhere; raise WeightsError if impossible."""
        for name, tensor in tensors.items():
            if type(tensor) not in _PLAIN:
                raise WeightsError(
                    f"{name} is a {type(tensor).__name__}, which cannot be shared between processes; "
                    "load the model in a dtype of torch"
                )
            if tensor.is_meta:
                raise WeightsError(
                    f"There is no room on the devices for all of the model: {name} was left out. "
                    "Load it in a smaller dtype, or give it more devices."
                )
        unique, names = distinct(tensors)
        return cls(names, tuple(export(unique)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, mapped into this process without a copy."""
        tensors = [function(*arguments) for function, arguments in self.handles]
        return {name: tensors[place] for name, place in self.names.items()}


@dataclass(frozen=True, slots=True)
class ModelDevices:
    """The devices of a loaded model."""

    device: str
    """The device of the model's inputs."""
    device_map: Mapping[str, Any] | None
    """The device of each submodule; None for a model that was loaded without a device map."""
    hooks: Mapping[str, Mapping[str, Any]]
    """The arguments of accelerate's hooks, which move a module's inputs, by module name."""

    @classmethod
    def of(cls, module: Any) -> ModelDevices:
        """Return the placement of `module`."""
        hooks = {
            name: {argument: getattr(hook, argument) for argument in _HOOK_ARGUMENTS}
            for name, part in module.named_modules()
            if (hook := getattr(part, "_hf_hook", None)) is not None
        }
        return cls(str(module.device), getattr(module, "hf_device_map", None), hooks)

    def apply(self, module: Any) -> None:
        """Replace the hooks of `module`, which nnsight may have wrapped, by the hooks of this placement."""
        for part in module.modules():
            if "_hf_hook" in vars(part):
                _unhook(part)
        if self.device_map is None:
            return
        module.hf_device_map = dict(self.device_map)
        for name, arguments in self.hooks.items():
            part = module.get_submodule(name)
            # nnsight's wrapper must call the hook, as if the hook had been added first.
            wrapper = vars(part).pop("forward", None)
            add_hook_to_module(part, _Hook(**arguments))
            if hasattr(part, "__nnsight_forward__"):  # the forward that nnsight 0.6 and 0.7 call
                part.__nnsight_forward__ = vars(part)["forward"].func
            if wrapper is not None:
                part.forward = wrapper


def _unhook(part: Any) -> None:
    wrapper = vars(part).pop("forward", None)
    remove_hook_from_module(part)
    vars(part).pop("forward", None)
    if hasattr(part, "__nnsight_forward__"):
        part.__nnsight_forward__ = type(part).forward
    if wrapper is not None:
        part.forward = wrapper


class _Hook(AlignDevicesHook):  # type: ignore[misc]
    """Accelerate's hook without the initial move of weights: they are, or will be, on their devices."""

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        return module


_ELSEWHERE = ("cpu", "disk")


def place(module: Any, spec: ModelSpec, driver: Cuda) -> None:
    """Move a model to the devices of `spec`; without a device map, leave it in place."""
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
    # All weights are already moved; this adds the hooks that move values between devices.
    dispatch_model(module, devices, skip_keys=module._skip_keys_device_placement)


def move(module: torch.nn.Module, devices: Mapping[str, Any], driver: Cuda) -> None:
    """Move a model's weights to `devices`, devices by submodule name; tied weights stay tied."""
    unique, places = distinct(collect(module))
    moved: dict[int, torch.Tensor] = {}
    for name, place in places.items():
        if place not in moved:
            moved[place] = _empty_like(unique[place], _device_of(name, devices))
    with torch.no_grad():
        to_devices(zip(moved.values(), unique, strict=True), driver)
    install(module, {name: moved[place] for name, place in places.items()})


def _empty_like(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _device_of(name: str, devices: Mapping[str, Any]) -> Any:
    """Return the device of the innermost submodule around `name` in `devices`."""
    prefix = name
    while prefix not in devices and prefix:
        prefix = prefix.rpartition(".")[0]
    return devices[prefix]


def spread(module: Any, max_memory: Mapping[int, int] | None) -> dict[str, Any]:
    """Return a device map within `max_memory` (bytes by GPU; None for all free) or raise WeightsError."""
    unsplit_classes = list(module._no_split_modules or [])
    limits = None if max_memory is None else dict(max_memory)
    balanced = get_balanced_memory(module, limits, no_split_module_classes=unsplit_classes)
    gpus = {device: size for device, size in balanced.items() if device not in _ELSEWHERE}
    device_map: dict[str, Any] = infer_auto_device_map(
        module, max_memory=gpus, no_split_module_classes=unsplit_classes
    )
    left_out = sorted(name for name, device in device_map.items() if device in _ELSEWHERE)
    if left_out:
        raise WeightsError(
            f"There is no room on the devices for all of the model: {left_out[0] or 'it'} was left "
            "out. Give the model more memory per device, or more devices."
        )
    return device_map


_REPORT_INTERVAL_S = 0.05


class _ProgressBar:
    """A replacement for a tqdm progress bar that reports counts and draws nothing."""

    def __init__(self, channel: FrameChannel | None, iterable: Any = None, **options: Any) -> None:
        self._channel = channel
        self._items = iterable
        self.total = options.get("total") or getattr(iterable, "__len__", lambda: None)()
        self.n = 0
        self._reported_at = 0.0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self.n += count
        now = time.monotonic()
        due = now - self._reported_at > _REPORT_INTERVAL_S
        if self.total and self._channel is not None and (due or self.n >= self.total):
            self._reported_at = now
            self._channel.send(Progress(int(self.n), int(self.total)))

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        # All other methods of a tqdm bar only affect its display.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def report_progress(channel: FrameChannel | None) -> None:
    """Replace the progress bars of transformers by reports over `channel`, if any."""
    logging.set_tqdm_hook(lambda _, args, kwargs: _ProgressBar(channel, *args[:1], **kwargs))
