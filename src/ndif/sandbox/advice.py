"""Advice in error messages, the same with and without the Protector."""

from __future__ import annotations


def send_along(module: str, name: str = "") -> str:
    """Return the advice for a module that only the user's machine has; the request takes `name` from it."""
    root = module.partition(".")[0]
    advice = f"If it is your own, send it along: `import {root}; nnsight.register({root})` before the trace"
    if not name:
        return advice
    return (
        f"{advice}. If it is registered, your nnsight has sent the name {name!r} alone, as of a function "
        "with functools.cache or functools.lru_cache: call the function without the cache"
    )
