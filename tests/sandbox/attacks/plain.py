"""Blocks that attack nothing: a probe with a known answer, and a block that ends a reused runner."""

from __future__ import annotations

from typing import Any


def answers(model: Any) -> object:
    """Return the results of a request, as exact numbers."""
    hidden = model.transformer.h[1].output.double().sum().item()
    logits = model.lm_head.output
    return [hidden, logits.double().sum().item(), logits[0, -1].tolist()]


def ends() -> object:
    """End the runner, with all state that was left in it."""
    import os

    os._exit(7)
    return None
