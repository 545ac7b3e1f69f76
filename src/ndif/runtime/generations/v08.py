"""nnsight 0.8: a payload is a tracer, the source of its block, and the values that the block refers to."""

from __future__ import annotations

import functools
import linecache
import logging
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from types import FunctionType
from typing import TYPE_CHECKING, Any

import nnsight
import torch
from nnsight.intervention import envoy, interleaver, iterator, serialization, source
from nnsight.intervention import tracer as interleaving
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema import request
from nnsight.schema.request import RequestModel
from nnsight.tracing import globals as tracing_globals
from nnsight.tracing import tracer as tracing

from ndif.runtime.generations import (
    BlockError,
    ClientStream,
    Generation,
    PayloadError,
    unpickling_errors,
)
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import explain
from ndif.runtime.weights.weights import Placement, load_arguments

if TYPE_CHECKING:
    from ndif.sandbox.protector import Protector

_INTERNAL = str(Path(nnsight.__file__).parent)

# The filtered warning is about a device beside a device map; a pipeline needs both to stay on the device.
logging.getLogger("transformers.pipelines").addFilter(lambda record: "device_map" not in record.msg)


_COMPILING = (tracing, interleaving, interleaver, iterator, serialization, request)
_SERIALIZATION = "nnsight.intervention.serialization"

_load_function = serialization._load_function
_interleave = envoy.Envoy.interleave
_compile_source = source.compile_source


class Nnsight08(Generation):
    """Load and run models with nnsight 0.8."""

    name = "0.8"

    def __init__(self) -> None:
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

    def move(self, placement: Placement) -> None:
        """See `Generation.move`."""
        super().move(placement)
        self.model.pipeline.device = torch.device(placement.device)

    def serialize(self, tracer: Any) -> bytes:
        """See `Generation.serialize`."""
        return bytes(RequestModel.serialize(tracer, compress=False))

    def _run(
        self, payload: bytes, stream: ClientStream, policy: Protector | None
    ) -> dict[str, Any]:
        if self._objects is None:
            self._objects = self.model._remoteable_persistent_objects()
        objects, unpickler = self._objects, serialization.CustomCloudUnpickler
        if policy is not None:
            objects, unpickler = policy.objects(objects), functools.partial(_Unpickler, policy)
        with unpickling_errors(self.name):
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

    def forget(self) -> None:
        """See `Generation.forget`."""
        # These are keyed by file and line: an edited script's next run would get the old block.
        tracing_globals.BLOCKS.clear()
        tracing_globals.SOURCES.clear()
        linecache.clearcache()
        self.model.interleaver.cancel()

    def _apply(self, env: Mapping[str, Any]) -> None:
        """Set the model to the adapter and attention implementation of this request alone."""
        # A client sends None for a key that it does not use, or leaves the key out.
        given = {"attn_implementation": self._attention, **env}
        env = {name: value for name, value in given.items() if value is not None}
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
            for parameter, trains in self._trained:
                parameter.requires_grad_(trains)

    def _guarding(self, policy: Protector) -> AbstractContextManager[None]:
        def compile_block(_: Any, module: Any, frame: Any) -> Any:
            code = policy.compile(module, frame.f_code.co_filename, "exec")
            return code.replace(co_name=frame.f_code.co_name)

        def interleave(self: Any, fn: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(fn, str):
                policy.check_call(self, fn)
            return _interleave(self, fn, *arguments, **options)

        def compile_source(function: Any) -> Any:
            policy.check_instrumented(function)
            return _compile_source(function)

        replaced = [
            (source, "compile_source", compile_source),
            (tracing.Tracer, "compile", compile_block),
            (envoy.Envoy, "interleave", interleave),
        ]
        return policy.guarding(_COMPILING, replaced)


# The policy for untrusted code


@functools.cache
def _methods() -> dict[tuple[tuple[str, ...], str], Any]:
    """Return nnsight's own traceable methods by the end of their file's path and their name.

    A wrapper has the method's name, so a client cannot refer to the method and sends its source. The
    server runs its own method instead.
    """
    found = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("nnsight.")]:
        for cls in [value for value in vars(module).values() if isinstance(value, type)]:
            for value in vars(cls).values():
                method = getattr(value, "__wrapped__", None)
                if isinstance(method, FunctionType) and method.__module__ == module.__name__:
                    code = method.__code__
                    found[PurePath(code.co_filename).parts[-3:], code.co_name] = method
    return found


class _Unpickler:
    """nnsight's unpickler under a policy, which checks an unpickled request before it is used."""

    def __init__(self, policy: Protector, file: Any, persistent: dict[str, Any]) -> None:
        ours: list[Any] = []

        def load_function(source: str, name: str, *others: Any) -> Any:
            own = _methods().get((PurePath(str(others[3])).parts[-3:], name))
            if own is not None:
                ours.append(own)
                return own
            return policy.adopt(_load_function(source, name, *others), {})

        def fill(function: Any, names: Mapping[str, Any]) -> None:
            if function not in ours:
                policy.fill(function, names)

        rebuilders = {
            (_SERIALIZATION, "_load_function"): load_function,
            (_SERIALIZATION, "_fill"): fill,
        }
        self._policy = policy
        self._unpickler = policy.unpickler(rebuilders)(file, persistent)

    def load(self) -> Any:
        """Return a tracer, and the source of its block with its names and variables."""
        tracer, (source, names, variables) = self._unpickler.load()
        if not isinstance(tracer, tracing.Tracer) or not isinstance(source, str):
            raise PayloadError("The request holds no trace of nnsight 0.8.")
        code = tracer.info.frame.f_code
        code.co_filename, code.co_name = self._policy.filename(code.co_filename), str(code.co_name)
        return tracer, (source, self._policy.scope(names), self._policy.scope(variables))
