"""How a process ended, in words."""

from __future__ import annotations

import signal


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "no exit code"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def describe_crash(code: int | None) -> str:
    """What to tell the user of a request whose runner ended with `code`."""
    how = describe_exit(code)
    if code is not None and code >= 0:
        return (
            f"The process that ran your block exited ({how}) before the block was done: something in "
            "it ends the process (os._exit, an abort in native code). Nothing was returned."
        )
    hint = {
        -9: "The system ended it, most often because it ran out of memory: save or compute less.",
        -11: "Native code touched memory it may not: a wrong pointer, or a bug in a library.",
        -6: "Native code gave up on an internal check.",
    }.get(code or 0, "Nothing more is known.")
    return f"The process that ran your block ended ({how}) before the block was done. {hint}"
