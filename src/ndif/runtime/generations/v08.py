"""nnsight 0.8: a payload is a tracer, the source of its block, and the values that the block refers to."""

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
from nnsight.tracing.backend import Backend

from ndif.runtime.generations.errors import BlockError, PayloadError, unpickling_errors
from ndif.runtime.generations.guarded08 import Unpickler, guarding
from ndif.runtime.generations.port import ClientStream, CodePolicy
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import explain
from ndif.runtime.weights.weights import Placement, load_arguments

_INTERNAL = str(Path(nnsight.__file__).parent)

# The filtered warning is about a device beside a device map; a pipeline needs both to stay on the device.
logging.getLogger("transformers.pipelines").addFilter(lambda record: "device_map" not in record.msg)


class Nnsight08:
    """Load and run models with nnsight 0.8."""

    def __init__(self) -> None:
        self.model: Any = None
        self._objects: dict[str, Any] | None = None
        self._trained: list[tuple[torch.nn.Parameter, bool]] | None = None
        """Each weight with its `requires_grad` before the first adapter was put on the model."""
        self._env: dict[str, Any] = {}
        self._attention: str | None = None
        """The implementation that the model was loaded with: the default for a request that names none."""

    def load(self, spec: ModelSpec) -> None:
        """See `Generation.load`."""
        arguments = load_arguments(spec)
        if arguments.get("device_map", "auto") != "auto":
            # Given the map alone, the pipeline moves the model to the first GPU.
            arguments["device"] = arguments["device_map"]
        elif spec.device == "cpu":
            # Given no device, the pipeline takes the first GPU where CUDA has started.
            arguments["device"] = "cpu"
        self.model = TransformersModel(
            spec.checkpoint, revision=spec.revision, task=spec.task, dispatch=True, **arguments
        )
        self._attention = self.model.attn_implementation

    def load_meta(self, spec: ModelSpec, placement: Placement) -> None:
        """See `Generation.load_meta`."""
        # nnsight's own way to build a model without weights leaves out the generation settings and the
        # evaluation mode, and takes the tokenizer of another revision.
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
        stream: ClientStream,
        policy: CodePolicy | None = None,
    ) -> dict[str, Any]:
        """See `Generation.run`. This generation has no hybrid jobs and does not use `stream`."""
        self._apply({"attn_implementation": self._attention, **env})
        if policy is None:
            return self._run(payload, self._persistent_objects(), CustomCloudUnpickler)
        objects = policy.objects(self._persistent_objects())
        with guarding(policy):
            return self._run(payload, objects, functools.partial(Unpickler, policy))

    def _run(self, payload: bytes, objects: dict[str, Any], unpickler: Any) -> dict[str, Any]:
        with unpickling_errors("0.8"):
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
            # nnsight stores a block's own traceback before the model's frames are added to the error's.
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

    def warmup_payload(self, prompt: str) -> bytes:
        """See `Generation.warmup_payload`."""
        return _payload_of_first_output(self.model, prompt)

    def _apply(self, env: dict[str, Any]) -> None:
        """Set the model to the adapter and attention implementation of this request alone."""
        # A client sends None for a key that it does not use, or leaves the key out.
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
            # An adapter freezes the model's weights; they stay frozen when it is removed.
            for parameter, trains in self._trained or ():
                parameter.requires_grad_(trains)

    def _persistent_objects(self) -> dict[str, Any]:
        if self._objects is None:
            self._objects = self.model._remoteable_persistent_objects()
        return self._objects


class _KeepPayload(Backend):  # type: ignore[misc]
    """A backend that keeps the payload that a client would send."""

    payload: bytes

    def __call__(self, tracer: Any) -> None:
        """See `Backend`."""
        self.payload = RequestModel.serialize(tracer, compress=False)


def _payload_of_first_output(model: Any, prompt: str) -> bytes:
    backend = _KeepPayload()
    with model.trace(prompt, backend=backend):
        first = model.output[0].save()  # noqa: F841 - the result of the trace
    return backend.payload
