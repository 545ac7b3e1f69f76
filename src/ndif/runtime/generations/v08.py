"""nnsight 0.8: a payload is a tracer, and the source of its block with what the block refers to."""

from __future__ import annotations

import functools
import linecache
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nnsight
import torch
from nnsight.intervention.serialization import CustomCloudUnpickler
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema.request import RequestModel
from nnsight.tracing import globals as tracing_globals
from nnsight.tracing import tracer as tracing

from ndif.runtime.generations.guarded08 import Unpickler, guarding
from ndif.runtime.generations.loading import load_arguments
from ndif.runtime.generations.port import BlockError, Conversation, PayloadError, Policy
from ndif.runtime.generations.unpacking import unpacking
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import explain
from ndif.runtime.weights import Placement

_INTERNAL = str(Path(nnsight.__file__).parent)

# What it warns of, a device beside a device map, is what it takes to have the model there.
logging.getLogger("transformers.pipelines").addFilter(lambda record: "device_map" not in record.msg)


class Nnsight08:
    """The adapter of this generation."""

    def __init__(self) -> None:
        self.model: Any = None
        self._objects: dict[str, Any] | None = None
        self._trained: list[tuple[torch.nn.Parameter, bool]] | None = None
        """The weights, and whether each takes gradients, before the first adapter."""
        self._env: dict[str, Any] = {}
        self._attention: str | None = None
        """The implementation that the model was loaded with: what a request gets that names none."""

    def load(self, spec: ModelSpec) -> None:
        """See `Generation.load`."""
        arguments = load_arguments(spec)
        if arguments.get("device_map", "auto") != "auto":
            # Told of the map alone, the pipeline moves the model to the first GPU.
            arguments["device"] = arguments["device_map"]
        elif spec.device == "cpu":
            # Told of no device, it takes the first GPU where CUDA has started.
            arguments["device"] = "cpu"
        self.model = TransformersModel(
            spec.checkpoint, revision=spec.revision, task=spec.task, dispatch=True, **arguments
        )
        self._attention = self.model.attn_implementation

    def load_meta(self, spec: ModelSpec, placement: Placement) -> None:
        """See `Generation.load_meta`."""
        # Not nnsight's own way to do without weights: that one leaves out what comes with them, such as
        # the generation settings and the evaluation mode, and takes the tokenizer of another revision.
        self.load(replace(spec, device="meta"))
        self.move(placement)

    def move(self, placement: Placement) -> None:
        """See `Generation.move`."""
        placement.apply(self.model._module)
        self.model.pipeline.device = torch.device(placement.device)

    def run(
        self,
        payload: bytes,
        env: Mapping[str, Any],
        conversation: Conversation,
        policy: Policy | None = None,
    ) -> dict[str, Any]:
        """See `Generation.run`. This generation holds no conversation."""
        self._apply({"attn_implementation": self._attention, **env})
        if policy is None:
            return self._run(payload, self._persistent_objects(), CustomCloudUnpickler)
        objects = policy.objects(self._persistent_objects())
        with guarding(policy):
            return self._run(payload, objects, functools.partial(Unpickler, policy))

    def _run(self, payload: bytes, objects: dict[str, Any], unpickler: Any) -> dict[str, Any]:
        with unpacking("0.8"):
            tracer = RequestModel.deserialize(payload, objects, unpickler=unpickler)
            code, frame = tracer.info.code, tracer.info.frame
        tracing.inc()
        try:
            tracer.execute(code)
            saved = tracing._saves()
            return {
                name: value
                for name, value in frame.f_locals.items()
                if id(value) in saved and not name.startswith("__nnsight_")
            }
        except BaseException as error:
            # A block's own traceback is set aside before the model's frames pile up on it.
            tb = getattr(error, "__intervention_tb__", error.__traceback__)
            raise BlockError(explain(error, tb, _INTERNAL)) from error
        finally:
            tracing.dec()

    def export(self, saves: dict[str, Any]) -> dict[str, Any]:
        """See `Generation.export`."""
        return saves

    def forget(self) -> None:
        """See `Generation.forget`.

        The caches are keyed by file and line: an edited script's next run would get the old block.
        """
        tracing_globals.BLOCKS.clear()
        tracing_globals.SOURCES.clear()
        linecache.clearcache()
        self.model.interleaver.cancel()

    def _apply(self, env: dict[str, Any]) -> None:
        """Give the model the adapter and attention implementation of this request alone."""
        # A client names what it has none of, or leaves it out.
        env = {name: value for name, value in env.items() if value is not None}
        if env == self._env:
            return
        if self._trained is None:
            parameters = self.model._module.parameters()
            self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]
        try:
            self.model._remoteable_set_env(env)
        except Exception as error:
            self._env = {"": None}
            raise PayloadError(
                f"The model could not be prepared as the request asks ({env}): "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            self._objects = None
        self._env = env
        if "peft" not in env:
            # An adapter freezes what it is put on, and leaves it so.
            for parameter, trains in self._trained or ():
                parameter.requires_grad_(trains)

    def _persistent_objects(self) -> dict[str, Any]:
        if self._objects is None:
            self._objects = self.model._remoteable_persistent_objects()
        return self._objects
