"""Error texts for the author of a block: tracebacks without server frames."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any

_THIS_PACKAGE = str(PurePath(__file__).parent.parent)
_LIBRARIES = sorted(
    {f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib", "stdlib")},
    key=len,
    reverse=True,
)


def explain(error: BaseException, tb: TracebackType | None, internal: str) -> str:
    """Return the traceback of `error` without the server's frames.

    Frames of the user's block and modules are unchanged. Frames of nnsight (below the folder `internal`)
    and of this package are dropped. Library frames show paths relative to site-packages or the stdlib.
    """
    last = _text(error)
    lines = show_frames(walk(tb), internal)
    return f"Traceback (most recent call last):\n{lines}\n{last}" if lines else last


def show_frames(frames: Iterable[tuple[Any, int]], internal: str) -> str:
    """Format frames and their line numbers as `explain` does; return "" if all of them are dropped.

    Only `f_code` and `f_globals` of a frame are read.
    """
    shown = [
        _portable(frame)
        for frame in traceback.StackSummary.extract(iter(frames), capture_locals=False)
        if not frame.filename.startswith((internal, _THIS_PACKAGE))
    ]
    return "".join(traceback.format_list(shown)).rstrip()


def _text(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(type(error), error)).rstrip()
    except BaseException:
        # `__str__` of a user's exception class may itself raise.
        return f"{type(error).__name__}: <the text of this error cannot be made>"


class UserFacingError(Exception):
    """An error whose message is a complete sentence for a user."""


def sentence(error: BaseException) -> str:
    """Return the reason of an error, in one line if possible.

    The error message of a transformers pipeline contains a traceback for every class that it tried. The
    last line of the last traceback is the reason.
    """
    text = str(error).strip()
    if isinstance(error, UserFacingError):
        return text
    if "Traceback (most recent call last)" in text:
        return next(line for line in reversed(text.splitlines()) if line.strip())
    return f"{type(error).__name__}: {text}"


def walk(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a traceback with their line numbers."""
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


def _portable(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    for root in _LIBRARIES:
        if frame.filename.startswith(root):
            name = frame.filename.removeprefix(root)
            return traceback.FrameSummary(name, frame.lineno, frame.name, line=frame.line)
    return frame
