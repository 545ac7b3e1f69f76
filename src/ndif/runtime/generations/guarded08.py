"""Where nnsight 0.8 reads, compiles and runs a user's code, for a policy to stand there."""

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

from ndif.runtime.generations.port import PayloadError, Policy

_COMPILING = (tracing, interleaving, interleaver, iterator, serialization, request)

_SERIALIZATION = "nnsight.intervention.serialization"

_load_function = serialization._load_function
_interleave = envoy.Envoy.interleave


def guarding(policy: Policy) -> AbstractContextManager[None]:
    """While it lasts, blocks and what they call are a user's code."""

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
    """nnsight's own methods that can be traced, by the end of their file and their name.

    A client cannot refer to one, since a wrapper has its name, and sends its source. It is our own that
    runs.
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
    """nnsight's unpickler under a policy; what comes out of it is looked at before it is used."""

    def __init__(self, policy: Policy, file: Any, persistent: dict[str, Any]) -> None:
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
        """A tracer, and the source of its block with its names.

        Raises:
            PayloadError: if it is anything else.
        """
        tracer, (source, names, variables) = self._ordinary.load()
        if not isinstance(tracer, tracing.Tracer) or not isinstance(source, str):
            raise PayloadError("The request holds no trace of nnsight 0.8.")
        code = tracer.info.frame.f_code
        code.co_filename, code.co_name = self._policy.filename(code.co_filename), str(code.co_name)
        return tracer, (source, self._policy.scope(names), self._policy.scope(variables))
