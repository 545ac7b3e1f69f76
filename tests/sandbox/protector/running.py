"""Execution of source text as a user's code, with and without a Protector."""

from __future__ import annotations

import functools
import io
import traceback
from typing import Any

from ndif.sandbox.protector import Protector

FILE = "/home/user/script.py"


@functools.cache
def protector() -> Protector:
    """Return one Protector for all tests of a process, as a zygote has one for all its runners."""
    return Protector()


def guarded(source: str, **names: Any) -> dict[str, Any]:
    """Run `source` as a user's code; return the names that are bound afterwards."""
    scope = {"__name__": "__main__", **names}
    protector().execute(protector().compile(source, FILE), scope)
    return scope


def loaded(content: bytes) -> Any:
    """Return a payload's content, as a block receives it."""
    policy = protector()
    return policy.unpickler({})(io.BytesIO(content), policy.objects({})).load()


def unguarded(source: str, **names: Any) -> dict[str, Any]:
    """Run `source` without guards; return the names that are bound afterwards."""
    scope = {"__name__": "__main__", **names}
    exec(compile(source, FILE, "exec"), scope)
    return scope


def refusal(source: str, **names: Any) -> tuple[str, int]:
    """Run `source` as a user's code; return its error ("ImportError: …") and the error's line."""
    try:
        guarded(source, **names)
    except SyntaxError as error:
        return f"SyntaxError: {error.msg}", error.lineno or 0
    except BaseException as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == FILE
        ]
        return f"{type(error).__name__}: {error}", lines[-1] or 0
    raise AssertionError("nothing was refused")
