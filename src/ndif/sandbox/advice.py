"""Advice to a user, which is the same where a policy guards the block and where none does."""

from __future__ import annotations


def send_along(module: str, name: str = "") -> str:
    """Return the advice about a module that only its user has; `name` is what the request takes from it."""
    root = module.partition(".")[0]
    said = f"If it is your own, send it along: `import {root}; nnsight.register({root})` before the trace"
    if not name:
        return said
    return (
        f"{said}. If it is registered, your nnsight has sent the name {name!r} alone, as of a function "
        "with functools.cache or functools.lru_cache: call the function without that"
    )
