"""One adapter per nnsight generation: load a model, run a payload, name the user's error."""

from __future__ import annotations

import importlib

from ndif.runtime.generations.port import BlockError, Conversation, Generation, PayloadError

__all__ = ["BlockError", "Conversation", "Generation", "PayloadError", "adapter"]

_ADAPTERS = {
    "0.8": "ndif.runtime.generations.v08:Nnsight08",
    "0.7": "ndif.runtime.generations.v07:Nnsight07",
    "0.6": "ndif.runtime.generations.v06:Nnsight06",
}


def adapter(generation: str) -> Generation:
    """The adapter of `generation`, not yet loaded."""
    module, name = _ADAPTERS[generation].split(":")
    made: Generation = getattr(importlib.import_module(module), name)()
    return made
