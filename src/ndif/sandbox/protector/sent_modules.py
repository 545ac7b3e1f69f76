"""Modules of torch that a request brings: probes, autoencoders and other work of the user's own.

A module travels as its class and its state. The class is one of torch's own layers, or a user's class
derived from them. Such a module can do no more than a module that a block builds with its own class, which
may set any attribute of its instances. The hooks and the `forward` in a state are functions that the user
could call anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ndif.sandbox.protector.inheritance import bases, definer, full_name, home
from ndif.sandbox.protector.whitelist import ForbiddenError

_LAYERS = ("torch.nn.modules.", "einops.layers.torch")
"""Modules whose classes hold weights and settings, and rebuild nothing else from their state.

Others compile their state (`torch.fx`, `torch.jit`), join processes (`torch.nn.parallel`), or are a
model's.
"""


class SentModules:
    """The modules of one payload: each is made without its constructor, and given its state once.

    The server's modules are never among them, so a payload cannot change the server's modules.
    """

    def __init__(self, owns: Callable[[type], bool]) -> None:
        """Start without modules; `owns` returns True for the user's own classes."""
        self._owns = owns
        self._unfilled: dict[int, torch.nn.Module] = {}

    def make(self, cls: type[torch.nn.Module]) -> torch.nn.Module:
        """Return a new module without a state.

        Raises:
            ForbiddenError: If a request cannot hold instances of the class.
        """
        for base in bases(cls):
            layer = f"{home(base)}.".startswith(_LAYERS)
            if issubclass(base, torch.nn.Module) and not (layer or self._owns(base)):
                raise ForbiddenError(
                    f"a module of the class {full_name(base)} cannot be sent to this server. A request "
                    "may hold modules of torch.nn, and of classes that your own code derives from them; "
                    "the model's own modules can be used where they are"
                )
        # A user's `__new__` could return an existing module.
        module = object.__new__(cls)
        self._unfilled[id(module)] = module
        return module

    def fill(self, module: torch.nn.Module, state: Any) -> None:
        """Set the state of a module that `make` returned.

        Raises:
            ForbiddenError: If `make` did not return the module, it has a state, or `state` is malformed.
        """
        if self._unfilled.pop(id(module), None) is not module:
            raise ForbiddenError(
                f"a request cannot change an object of the class {type(module).__name__}"
            )
        origin = definer(bases(type(module)), "__setstate__")
        is_users_own = origin is not None and self._owns(origin)
        if not is_users_own and (
            type(state) is not dict or any(type(name) is not str for name in state)
        ):
            raise ForbiddenError(
                f"the state of a module ({type(module).__name__}) must be a dictionary of its attributes"
            )
        module.__setstate__(state)  # type: ignore[no-untyped-call,unused-ignore]
