"""Errors of blocks that nnsight compiled, told in the lines of their author's file.

nnsight 0.6 and 0.7 compile every `with` block into a function of a file `<nnsight ...>`; one inside
another is compiled from the text of the function around it. Each knows where it was cut out.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple, cast

from nnsight.intervention import serialization
from nnsight.intervention.tracing.util import ExceptionWrapper

from ndif.runtime.tracebacks import explain

_COMPILED = "<nnsight "
_REWRITTEN = "<nnsight>"
"""The file of a module's forward that was rewritten for `.source`."""

_INFO = "__nnsight_tracing_info__"
"""The local variable of a compiled function that says where its text is from."""


class _Frame(NamedTuple):
    f_code: CodeType
    f_globals: dict[str, Any]


class _Traceback(NamedTuple):
    """As much of a traceback as `explain` reads."""

    tb_frame: Any
    tb_lineno: int
    tb_next: _Traceback | None


def explain_block(error: BaseException, outermost: Any, internal: str) -> str:
    """The traceback of `error`, raised in the block `outermost`, as its author should read it."""
    original, frames = error, list(_walk(error.__traceback__))
    infos = {outermost.filename: outermost}
    if isinstance(error, ExceptionWrapper):
        # The block ran in a thread of its own. What led there is of interest only outside the model.
        original = error.original
        around = itertools.takewhile(lambda step: step[0].f_code.co_name != "interleave", frames)
        frames = [*around, *_walk(original.__traceback__)]
        infos.update((info.filename, info) for info in reversed(error.infos))
    tb = None
    for frame, line in reversed(list(_as_written(frames, infos))):
        tb = _Traceback(frame, line, tb)
    return explain(original, cast("TracebackType | None", tb), internal)


def _walk(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


def _as_written(
    frames: list[tuple[FrameType, int]], infos: dict[str, Any]
) -> Iterator[tuple[FrameType | _Frame, int]]:
    """The frames, those of compiled functions where their author wrote them."""
    for frame, line in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_COMPILED):
            if code.co_filename != _REWRITTEN:
                yield frame, line
            continue
        # A function or comprehension within the block has the block's file, but not the variable.
        own = frame.f_locals.get(_INFO)
        info = own or infos.get(code.co_filename)
        if info is None:
            continue
        infos[code.co_filename] = info
        filename, name, before = _place(info)
        _remember(filename, before + line, [info.source[line - 1]])
        name = name if own else code.co_name
        yield _Frame(code.replace(co_filename=filename, co_name=name), {}), before + line


def _place(info: Any) -> tuple[str, str, int]:
    """The author's file and function, and how many lines there are before the compiled text."""
    before = info.start_line - 1
    while (around := info.frame.f_locals.get(_INFO)) is not None:
        info = around
        before += info.start_line - 1
    code = info.frame.f_code
    # Lines are counted from the function's first. Of a module ("<module>", or a notebook's cell) they
    # are counted from 1, whatever Python before 3.11 calls its first.
    first = 1 if code.co_name.startswith("<") else code.co_firstlineno
    return code.co_filename, code.co_name, before + first - 1


def _remember(filename: str, number: int, lines: Sequence[str]) -> None:
    """Let `linecache` know lines of a file that is on the author's machine, from `number` on."""
    entry = linecache.cache.get(filename, ())
    known = list(entry[2]) if len(entry) == 4 else []
    known += ["\n"] * (number - 1 - len(known))
    known[number - 1 : number - 1 + len(lines)] = lines
    linecache.cache[filename] = (sum(map(len, known)), None, known, filename)


_make_function = serialization.make_function


@functools.wraps(_make_function)
def _make_function_in_place(*arguments: Any) -> FunctionType:
    """`make_function`, which numbers the lines of a function, but not those of functions within it.

    And which takes the text of a file that happens to be here for that of the author's.
    """
    function: FunctionType = _make_function(*arguments)
    source, filename, closure, first = (arguments[index] for index in (0, 2, 10, 12))
    if first > 1:
        # A function that closes over values was compiled below two lines that build it.
        constants = _moved(function.__code__.co_consts, first - (3 if closure else 1))
        function.__code__ = function.__code__.replace(co_consts=constants)
    if filename:
        _remember(filename, first, source.splitlines(keepends=True))
    return function


def _moved(constants: tuple[Any, ...], lines: int) -> tuple[Any, ...]:
    return tuple(
        constant.replace(
            co_firstlineno=constant.co_firstlineno + lines,
            co_consts=_moved(constant.co_consts, lines),
        )
        if isinstance(constant, CodeType)
        else constant
        for constant in constants
    )


serialization.make_function = _make_function_in_place
