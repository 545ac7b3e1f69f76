"""Decorated functions, as nnsight 0.6 and 0.7 send them.

nnsight sends the closure of the wrapper, but with the source of the wrapped function and its decorator. For
torch's own decorators (`torch.no_grad`, `torch.inference_mode`) the wrapper's source is known.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from pathlib import Path
from types import FunctionType
from typing import Any

import nnsight
from nnsight.intervention import serialization

from ndif.runtime.generations import PayloadError, sources
from ndif.runtime.results import trusted

_OF_TORCH = ("ctx_factory", "func")
"""Names in the closure of torch's wrappers."""

_WRAPPER = """
def {name}(*args, **kwargs):
    with ctx_factory():
        {called} func(*args, **kwargs)
"""

_HIDDEN = str(Path(nnsight.__file__).parent / "decorated")
"""A file name below nnsight's folder, so that tracebacks hide its frames."""

_MODULE, _CLOSURE = 4, 11
"""Positions of the module and the closure's names among the arguments of `make_function`."""

_make_function = serialization.make_function


@functools.wraps(_make_function)
def _make_wrapper(*arguments: Any) -> FunctionType:
    """Replace `make_function`: rebuild torch's wrappers, explain failures, record the function."""
    source, name, _, *others = arguments
    if tuple(arguments[_CLOSURE] or ()) == _OF_TORCH and name.isidentifier():
        called = "yield from" if _yields(source) else "return"
        source = _WRAPPER.format(name=name, called=called)
        arguments = (source, name, _HIDDEN, *others)
    try:
        function: FunctionType = _make_function(*arguments)
    except Exception as error:
        if str(arguments[_MODULE]).startswith("nnsight."):
            # A method of a class for which the server's own class is used (`overloaded07`).
            return FunctionType(_not_sent.__code__, {}, name)
        if not isinstance(error, NameError):
            raise
        raise PayloadError(
            f"The block uses the function {name!r}, whose decorator this nnsight does not send along "
            f"({error}). Call the function without its decorator, or write the decorator without "
            "functools.wraps."
        ) from error
    trusted.record(function)
    sources.record(source, function)
    return function


def _not_sent(*_: object, **__: object) -> None:
    raise RuntimeError(
        "this function of nnsight cannot run, because the request has only a part of it"
    )


def _yields(source: str) -> bool:
    tree = ast.parse(textwrap.dedent(source))
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(tree))


serialization.make_function = _make_wrapper
