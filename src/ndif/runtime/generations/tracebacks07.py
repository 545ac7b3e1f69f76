"""Tracebacks of blocks that nnsight 0.6 and 0.7 compiled, with the lines of their author's file.

nnsight 0.6 and 0.7 compile every `with` block into a function of a file `<nnsight ...>`. An inner block is
compiled from the text of its outer function. Each function records where its text comes from.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import linecache
import symtable
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from nnsight.intervention import serialization
from nnsight.intervention.tracing.util import ExceptionWrapper

from ndif.runtime.tracebacks import explain, show_frames, walk

if TYPE_CHECKING:
    from ndif.sandbox.protector.names import Variables

_COMPILED = "<nnsight "
_REWRITTEN = "<nnsight>"
"""The file name of a module's forward that was rewritten for `.source`."""

_INFO = "__nnsight_tracing_info__"
"""The local variable of a compiled function that records where its text comes from."""


class _Frame(NamedTuple):
    f_code: CodeType
    f_globals: Variables
    f_locals: Mapping[str, Any] = MappingProxyType({})


class _Traceback(NamedTuple):
    """The attributes of a traceback that `explain` reads."""

    tb_frame: Any
    tb_lineno: int
    tb_next: _Traceback | None


def explain_block(error: BaseException, outermost: Any, internal: str) -> str:
    """Return the traceback of `error`, raised in the block `outermost`, with its author's lines."""
    original, frames = error, list(walk(error.__traceback__))
    infos = {outermost.filename: outermost}
    if isinstance(error, ExceptionWrapper):
        # The block ran in its own thread. Of the calling frames, only those before the model matter.
        original = error.original
        callers = itertools.takewhile(lambda step: step[0].f_code.co_name != "interleave", frames)
        frames = [*callers, *walk(original.__traceback__)]
        infos.update((info.filename, info) for info in reversed(error.infos))
    tb = None
    for frame, line in reversed(list(_at_author_lines(frames, infos))):
        tb = _Traceback(frame, line, tb)
    return explain(original, cast("TracebackType | None", tb), internal)


def codes_above(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Return the code and line of a frame and its callers, outermost first."""
    codes: list[tuple[CodeType, int]] = []
    while frame is not None:
        codes.insert(0, (frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return codes


def show_lines(codes: Sequence[tuple[CodeType, int]], info: Any, internal: str) -> str:
    """Return the running lines of the block `info`, as `explain_block` shows them."""
    # The frames above the block belong to the start of its thread.
    block_codes = itertools.dropwhile(
        lambda step: not step[0].co_filename.startswith(_COMPILED), codes
    )
    frames = [
        (_Frame(code, {}, {_INFO: info} if code.co_name.startswith("__nnsight_") else {}), line)
        for code, line in block_codes
    ]
    return show_frames(_at_author_lines(frames, {info.filename: info}), internal)


def _at_author_lines(
    frames: Sequence[tuple[FrameType | _Frame, int]], infos: dict[str, Any]
) -> Iterator[tuple[FrameType | _Frame, int]]:
    """Yield the frames, with compiled functions at the position in their author's file."""
    for frame, line in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_COMPILED):
            if code.co_filename != _REWRITTEN:
                yield frame, line
            continue
        # A function or comprehension in a block shares the block's file name, but lacks `_INFO`.
        own = frame.f_locals.get(_INFO)
        info = own or infos.get(code.co_filename)
        if info is None:
            continue
        infos[code.co_filename] = info
        filename, name, before = _author_position(info)
        _cache_lines(filename, before + line, [info.source[line - 1]])
        name = name if own else code.co_name
        yield _Frame(code.replace(co_filename=filename, co_name=name), {}), before + line


def _author_position(info: Any) -> tuple[str, str, int]:
    """Return the author's file and function, and the number of lines before the compiled text."""
    before = info.start_line - 1
    while (outer := info.frame.f_locals.get(_INFO)) is not None:
        info = outer
        before += info.start_line - 1
    code = info.frame.f_code
    # Lines count from the function's first line. For a module ("<module>", or a notebook's cell) that is 1,
    # although Python before 3.11 may report another.
    first = 1 if code.co_name.startswith("<") else code.co_firstlineno
    return code.co_filename, code.co_name, before + first - 1


def _cache_lines(filename: str, number: int, lines: Sequence[str]) -> None:
    """Add lines of the author's file to `linecache`, from line `number` on."""
    entry = linecache.cache.get(filename, ())
    cached = list(entry[2]) if len(entry) == 4 else []
    cached += ["\n"] * (number - 1 - len(cached))
    cached[number - 1 : number - 1 + len(lines)] = lines
    linecache.cache[filename] = (sum(map(len, cached)), None, cached, filename)


_make_function = serialization.make_function
_WITHOUT_LINE = 12
"""Number of arguments from clients before 0.6.3, which do not send the first line's number."""


@functools.wraps(_make_function)
def _make_function_in_place(*arguments: Any) -> FunctionType:
    """Replace `make_function`: correct the line numbers of nested functions, and show the author's text.

    nnsight corrects only the outer function, and would show a file of the same name on this machine.
    """
    if len(arguments) == _WITHOUT_LINE:
        arguments = (*arguments, 1)
    source, filename, closure, first = (arguments[index] for index in (0, 2, 10, 12))
    function: FunctionType = _make_function(*_undecorated(*arguments))
    if first > 1:
        # A closure was compiled below two lines of a factory function.
        constants = _shift_lines(function.__code__.co_consts, first - (3 if closure else 1))
        function.__code__ = function.__code__.replace(co_consts=constants)
    if filename:
        _cache_lines(filename, first, source.splitlines(keepends=True))
    return function


def _undecorated(source: str, *others: Any) -> tuple[Any, ...]:
    """Return the arguments of `make_function` without the decorators of a closure.

    Decorators would run before the names that they use are filled in. The client has already applied the
    decorators: it sends a decorator's wrapper as a separate function.
    """
    names, first = others[-2:]
    with contextlib.suppress(SyntaxError, ValueError):
        text = textwrap.dedent(source)
        [definition] = ast.parse(text).body
        if names and isinstance(definition, ast.FunctionDef) and definition.decorator_list:
            first_decorator = min(decorator.lineno for decorator in definition.decorator_list) - 1
            count = definition.lineno - 1 - first_decorator
            lines = text.splitlines(keepends=True)
            lines[first_decorator : first_decorator + count] = ["\n"] * count
            text = "".join(lines)
            # False for a decorator's wrapper, which comes with the source of the wrapped function.
            if _free_names(text, names) == {*names}:
                return (text, *others[:-1], first + count)
    return (source, *others)


def _free_names(function: str, names: Sequence[str]) -> set[str]:
    """Return the outer `names` over which a function's text closes."""
    wrapped = f"def around({', '.join(names)}):\n{textwrap.indent(function, '    ')}"
    [table] = symtable.symtable(wrapped, "", "exec").get_children()
    [inner] = [child for child in table.get_children() if isinstance(child, symtable.Function)]
    return {*inner.get_frees()}


def _shift_lines(constants: tuple[Any, ...], lines: int) -> tuple[Any, ...]:
    return tuple(
        constant.replace(
            co_firstlineno=constant.co_firstlineno + lines,
            co_consts=_shift_lines(constant.co_consts, lines),
        )
        if isinstance(constant, CodeType)
        else constant
        for constant in constants
    )


serialization.make_function = _make_function_in_place
