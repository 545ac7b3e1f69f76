"""Protection of the model, its modules and weights, and nnsight's wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from ndif.sandbox.protector.inheritance import home
from ndif.sandbox.protector.names import words

_ACTIVATIONS = words("output input inputs grad result")
"""Attributes that nnsight serves while the model runs: never copied."""

_WEIGHT_LISTINGS = words("parameters named_parameters buffers named_buffers state_dict")
"""Methods that return many weights at once."""


class ProtectedObjects:
    """The objects of the server that a block may use, and the rules for their attributes.

    Owns the set of protected objects, by identity, and the copies of weights that a block has received.
    Objects are checked where a block touches them, so that nnsight, torch and a block's `isinstance` see
    the objects themselves. `AccessGuards` decides when to ask.
    """

    def __init__(self) -> None:
        self._objects: Mapping[str, Any] | None = None
        self._held: dict[int, Any] = {}
        self._weights: dict[int, torch.Tensor] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def hold(self, objects: Mapping[str, Any]) -> None:
        """Protect `objects` and the modules, weights and settings that they hold; release earlier ones.

        The same dictionary is not traversed again, because a runner inherits the result from its zygote.
        """
        self._copies.clear()
        if objects is self._objects:
            return
        self._objects = objects
        self._held.clear()
        self._weights.clear()
        for value in objects.values():
            self._hold(value)

    def _hold(self, value: Any) -> None:
        if id(value) in self._held:
            return
        self._held[id(value)] = value
        if isinstance(value, torch.nn.Module):
            for weight in [*value.parameters(False), *value.buffers(False), *vars(value).values()]:
                if isinstance(weight, torch.Tensor):
                    self._weights[id(weight)] = weight
            for module in value.children():
                self._hold(module)
        if _is_instance(value):
            for name in ("config", "generation_config", "model", "tokenizer", "backend_tokenizer"):
                held = getattr(value, name, None)
                if _is_instance(held):
                    self._hold(held)

    def __contains__(self, value: Any) -> bool:
        return self._held.get(id(value)) is value

    def protect_attribute(self, name: str, result: Any) -> Any:
        """Return the value that a block gets for an attribute of a protected object or of its wrapper."""
        if name in _ACTIVATIONS:
            return result
        if isinstance(result, torch.Tensor):
            return self._copied(result) if id(result) in self._weights else result
        if type(result) in (list, dict, set):
            return copy.deepcopy(result)
        if name in _WEIGHT_LISTINGS and isinstance(result, MethodType | FunctionType):
            return self._listing(result)
        if _is_instance(result) and is_of_model_libraries(type(result)):
            self._held[id(result)] = result
        return result

    def protect_method(self, name: str, result: Any) -> Any:
        """Return the value that a block gets for a method of a module class, callable with any module."""
        if name not in _WEIGHT_LISTINGS or not isinstance(result, FunctionType):
            return result
        listing = self._listing(result)

        def listed(*arguments: Any, **options: Any) -> Any:
            module = arguments[0] if arguments else options.get("self")
            return (listing if module in self else result)(*arguments, **options)

        return listed

    def _copied(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the copy of a weight, the same object each time, with the weight's gradient."""
        if id(weight) not in self._copies:
            duplicate = copy.deepcopy(weight) if weight.is_leaf else weight.clone()
            self._copies[id(weight)] = (weight, duplicate)
        duplicate = self._copies[id(weight)][1]
        gradient = weight.grad if weight.is_leaf else None
        if gradient is not None and duplicate.grad is None and duplicate.is_leaf:
            duplicate.grad = gradient.clone()
        return duplicate

    def _listing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def listed(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            if isinstance(result, dict):
                return type(result)((name, self._copied(weight)) for name, weight in result.items())
            return (
                (item[0], self._copied(item[1])) if isinstance(item, tuple) else self._copied(item)
                for item in result
            )

        return listed


def _is_instance(value: Any) -> bool:
    """Return True for an object with attributes of its own that is no class, function or tensor."""
    return hasattr(value, "__dict__") and not isinstance(
        value, type | FunctionType | MethodType | BuiltinFunctionType | torch.Tensor
    )


def is_of_model_libraries(cls: type) -> bool:
    """Return True if a class is one of transformers, tokenizers or peft."""
    return home(cls).partition(".")[0] in ("transformers", "tokenizers", "peft")
