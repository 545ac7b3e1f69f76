"""Blocks that attack nothing: what the next request must be answered, and how a kept runner is ended."""

from __future__ import annotations

from typing import Any


def answers(model: Any) -> object:
    """Everything that a request computes, as exact numbers."""
    hidden = model.transformer.h[1].output.double().sum().item()
    logits = model.lm_head.output
    return [hidden, logits.double().sum().item(), logits[0, -1].tolist()]


def ends() -> object:
    """Ends its runner, so that what it left there is gone."""
    import os

    os._exit(7)
    return None
