"""One class per nnsight generation: load a model, run a payload, name the error of its user."""

from __future__ import annotations

import importlib

from ndif.runtime.generations.errors import BlockError, PayloadError
from ndif.runtime.generations.port import ClientStream, Generation

__all__ = ["BlockError", "ClientStream", "Generation", "PayloadError", "create_generation"]

_GENERATIONS = {
    "0.8": "ndif.runtime.generations.v08:Nnsight08",
    "0.7": "ndif.runtime.generations.v07:Nnsight07",
    "0.6": "ndif.runtime.generations.v07:Nnsight06",
}


def create_generation(name: str) -> Generation:
    """Return the generation `name` ("0.8") without a model; only its own nnsight can import it."""
    module, cls = _GENERATIONS[name].split(":")
    generation: Generation = getattr(importlib.import_module(module), cls)()
    return generation
