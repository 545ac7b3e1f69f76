"""Put a `CodePolicy` where nnsight 0.6 and 0.7 read, compile and run a user's code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import FrameType, FunctionType, ModuleType
from typing import Any

from nnsight.intervention import envoy, serialization
from nnsight.intervention.backends import base
from nnsight.intervention.tracing.base import Tracer

from ndif.runtime.generations.errors import PayloadError
from ndif.runtime.generations.port import CodePolicy

_SERIALIZATION = "nnsight.intervention.serialization"
_FILENAME, _NAMES = 2, 9
"""Positions of the file name and the names among the arguments of `make_function`."""

_Unpickler = serialization.CustomCloudUnpickler
_setstate = serialization._source_function_setstate
_interleave = envoy.Envoy.interleave


def guarding(policy: CodePolicy) -> AbstractContextManager[None]:
    """Apply `policy` to blocks and the functions that they call while the context lasts."""

    def make_function(*arguments: Any) -> Any:
        given = list(arguments)
        given[_FILENAME] = policy.filename(given[_FILENAME])
        names = given[_NAMES] = policy.scope(given[_NAMES])
        try:
            function = serialization.make_function(*given)
        except ValueError as error:
            # The cause names a line of the user's code; the error around it does not.
            raise error.__cause__ or error from None
        return policy.adopt(function, names)

    def setstate(function: FunctionType, state: tuple[Any, dict[str, Any]]) -> None:
        own, slots = state
        names = slots.get("__globals__", {})
        policy.fill(function, names)
        if isinstance(function, FunctionType):
            own = {name: value for name, value in own.items() if not name.startswith("__")}
            _setstate(function, (own, {**slots, "__globals__": policy.scope(names)}))

    def unpickler(file: Any, persistent: Mapping[str, Any] | None = None) -> Any:
        return policy.unpickler(
            _Unpickler,
            {
                (_SERIALIZATION, "make_function"): make_function,
                (_SERIALIZATION, "_source_function_setstate"): setstate,
            },
        )(file, persistent)

    def interleave(self: Any, fn: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(fn, str):
            policy.check_call(fn)
        return _interleave(self, fn, *arguments, **options)

    return policy.guarding(
        [base, serialization],
        [
            (serialization, "CustomCloudUnpickler", unpickler),
            (envoy.Envoy, "interleave", interleave),
            *((module, _FRAME, _users_frame) for module in _modules_with(_FRAME)),
        ],
    )


_FRAME = "get_non_nnsight_frame"


def _users_frame() -> FrameType | None:
    """Replace `get_non_nnsight_frame`: skip frames of this package, which nnsight takes for the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("nnsight", "ndif"):
            break
    return frame


def _modules_with(name: str) -> list[ModuleType]:
    modules = [module for key, module in sys.modules.items() if key.startswith("nnsight.")]
    return [module for module in modules if name in vars(module)]


def check(policy: CodePolicy, request: Any) -> None:
    """Check that a request holds a tracer and a function that came with it as source.

    Raises:
        PayloadError: if it holds anything else.
    """
    function, tracer = request.interventions, request.tracer
    if not (isinstance(tracer, Tracer) and isinstance(function, FunctionType)):
        raise PayloadError("The request holds no trace of nnsight.")
    if not policy.runs(function):
        raise PayloadError("The request holds a block that did not come with it.")
    code = tracer.info.frame.f_code
    code.co_filename = policy.filename(code.co_filename)
