"""Errors as the author of a block should read them."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType, TracebackType

_OURS = str(PurePath(__file__).parent.parent)
_LIBRARIES = sorted(
    {f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib", "stdlib")},
    key=len,
    reverse=True,
)


def explain(error: BaseException, tb: TracebackType | None, internal: str) -> str:
    """The traceback of `error` with the server left out.

    Frames of the user's block and modules are shown as they are; frames of nnsight (below the folder
    `internal`) and of this package are dropped; frames of libraries are shown by their place in the
    library, not on this machine.
    """
    frames = [
        _portable(frame)
        for frame in traceback.StackSummary.extract(_walk(tb), capture_locals=False)
        if not frame.filename.startswith((internal, _OURS))
    ]
    last = _text(error)
    if not frames:
        return last
    lines = "".join(traceback.format_list(frames)).rstrip()
    return f"Traceback (most recent call last):\n{lines}\n{last}"


def _text(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(type(error), error)).rstrip()
    except BaseException:
        # A class of the user's own: its notes, say, may be code.
        return f"{type(error).__name__}: <its text cannot be made>"


class SaidError(Exception):
    """One whose message is a sentence for whoever asked."""


def sentence(error: BaseException) -> str:
    """Why something failed, in one line where that can be.

    A pipeline of transformers puts the tracebacks of every class that it tried into its message; the
    last line of the last of them is the reason.
    """
    text = str(error).strip()
    if isinstance(error, SaidError):
        return text
    if "Traceback (most recent call last)" in text:
        return next(line for line in reversed(text.splitlines()) if line.strip())
    return f"{type(error).__name__}: {text}"


def _walk(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


def _portable(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    for root in _LIBRARIES:
        if frame.filename.startswith(root):
            name = frame.filename.removeprefix(root)
            return traceback.FrameSummary(name, frame.lineno, frame.name, line=frame.line)
    return frame
