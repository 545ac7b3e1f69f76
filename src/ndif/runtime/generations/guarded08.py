"""Put a `CodePolicy` where nnsight 0.8 reads, compiles and runs a user's code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import PurePath
from types import FunctionType
from typing import Any

from nnsight.intervention import envoy, interleaver, iterator, serialization
from nnsight.intervention import tracer as interleaving
from nnsight.schema import request
from nnsight.tracing import tracer as tracing

from ndif.runtime.generations.errors import PayloadError
from ndif.runtime.generations.port import CodePolicy

_COMPILING = (tracing, interleaving, interleaver, iterator, serialization, request)

_SERIALIZATION = "nnsight.intervention.serialization"

_load_function = serialization._load_function
_interleave = envoy.Envoy.interleave


def guarding(policy: CodePolicy) -> AbstractContextManager[None]:
    """Apply `policy` to blocks and the functions that they call while the context lasts."""

    def compile_block(_: Any, module: Any, frame: Any) -> Any:
        code = policy.compile(module, frame.f_code.co_filename, "exec")
        return code.replace(co_name=frame.f_code.co_name)

    def interleave(self: Any, fn: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(fn, str):
            policy.check_call(fn)
        return _interleave(self, fn, *arguments, **options)

    return policy.guarding(
        _COMPILING,
        [
            (tracing.Tracer, "compile", compile_block),
            (envoy.Envoy, "interleave", interleave),
        ],
    )


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


class Unpickler:
    """nnsight's unpickler under a policy, which checks an unpickled request before it is used."""

    def __init__(self, policy: CodePolicy, file: Any, persistent: dict[str, Any]) -> None:
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

        self._policy = policy
        self._ordinary = policy.unpickler(
            serialization.CustomCloudUnpickler,
            {
                (_SERIALIZATION, "_load_function"): load_function,
                (_SERIALIZATION, "_fill"): fill,
            },
        )(file, persistent)

    def load(self) -> Any:
        """Return a tracer, and the source of its block with its names and variables.

        Raises:
            PayloadError: if the payload holds anything else.
        """
        tracer, (source, names, variables) = self._ordinary.load()
        if not isinstance(tracer, tracing.Tracer) or not isinstance(source, str):
            raise PayloadError("The request holds no trace of nnsight 0.8.")
        code = tracer.info.frame.f_code
        code.co_filename, code.co_name = self._policy.filename(code.co_filename), str(code.co_name)
        return tracer, (source, self._policy.scope(names), self._policy.scope(variables))
