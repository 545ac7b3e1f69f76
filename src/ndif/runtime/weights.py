"""Weights apart from their modules: taken from a model in one process, given to its like in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""What makes a tensor in another process: a function and its arguments."""

Export = Callable[[Iterable[torch.Tensor]], list[Handle]]
"""Shares tensors with other processes: `Driver.export`."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NAMED = 5


class WeightsError(ValueError):
    """The weights of a model cannot be shared; the message says why."""


def collect(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its name; one that is tied is there under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def check(module: torch.nn.Module, names: Iterable[str]) -> None:
    """See that `module` has a place for each of `names`, and for nothing else.

    Raises:
        WeightsError: if not.
    """
    differing = sorted(collect(module).keys() ^ set(names))
    if differing:
        raise WeightsError(
            "The model has other tensors once it is loaded than it is built with, so it cannot be "
            f"shared between processes: {', '.join(differing[:_NAMED])}"
        )


def install(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put tensors that were collected from one module into the places of another of its kind.

    Raises:
        WeightsError: if it is not of the same kind.
    """
    check(module, tensors)
    for name, tensor in tensors.items():
        path, _, key = name.rpartition(".")
        part = module.get_submodule(path)
        places = part._parameters if key in part._parameters else part._buffers
        places[key] = tensor  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Exported:
    """Tensors as another process can have them."""

    names: Mapping[str, int]
    """Which of the handles is behind a name; those of one tensor share it."""
    handles: tuple[Handle, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], export: Export) -> Exported:
        """Share `tensors`; they must be kept for as long as another process may use them.

        Raises:
            WeightsError: if one of them cannot be shared.
        """
        different = {id(tensor): tensor for tensor in tensors.values()}
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
        places = {key: place for place, key in enumerate(different)}
        return cls(
            {name: places[id(tensor)] for name, tensor in tensors.items()},
            tuple(export(different.values())),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, as this process has them: the same memory, nothing is copied."""
        made = [function(*arguments) for function, arguments in self.handles]
        return {name: made[place] for name, place in self.names.items()}


@dataclass(frozen=True, slots=True)
class Placement:
    """On which devices a loaded model is."""

    device: str
    """Where its inputs go."""
    device_map: Mapping[str, Any] | None
    """What is where, if it is spread over several devices."""
    hooks: Mapping[str, Mapping[str, Any]]
    """How accelerate then moves what goes into a module, by the module's name."""

    @classmethod
    def of(cls, module: Any) -> Placement:
        """Where `module` is."""
        hooks = {
            name: {
                "execution_device": hook.execution_device,
                "io_same_device": hook.io_same_device,
                "skip_keys": hook.skip_keys,
            }
            for name, part in module.named_modules()
            if (hook := getattr(part, "_hf_hook", None)) is not None
        }
        return cls(str(module.device), getattr(module, "hf_device_map", None), hooks)

    def apply(self, module: Any) -> None:
        """Have values moved in `module`, which nnsight has wrapped, as they are where the weights are.

        An earlier placement of it is forgotten.
        """
        for part in module.modules():
            if "_hf_hook" in vars(part):
                _unhook(part)
        if self.device_map is None:
            return
        module.hf_device_map = dict(self.device_map)
        for name, arguments in self.hooks.items():
            part = module.get_submodule(name)
            # The hook belongs below what nnsight put there, as if it had been first.
            wrapper = vars(part).pop("forward", None)
            add_hook_to_module(part, _Hook(**arguments))
            if hasattr(part, "__nnsight_forward__"):  # what nnsight 0.6 and 0.7 call
                part.__nnsight_forward__ = vars(part)["forward"].func
            if wrapper is not None:
                part.forward = wrapper


def _unhook(part: Any) -> None:
    """Take a hook from below what nnsight put there."""
    wrapper = vars(part).pop("forward", None)
    remove_hook_from_module(part)
    vars(part).pop("forward", None)
    if hasattr(part, "__nnsight_forward__"):
        part.__nnsight_forward__ = type(part).forward
    if wrapper is not None:
        part.forward = wrapper


class _Hook(AlignDevicesHook):  # type: ignore[misc]
    """Accelerate's, for a module whose weights are where they belong, or will come there."""

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move no weights."""
        return module
