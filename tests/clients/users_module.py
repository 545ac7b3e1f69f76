"""A user's own module, which no server has installed."""

from __future__ import annotations

import torch


def centred(value: torch.Tensor) -> torch.Tensor:
    """Return `value` minus its mean."""
    return value - value.mean()


def fails(value: torch.Tensor) -> torch.Tensor:
    """Raise, some lines down."""
    centred(value)
    raise KeyError("no such probe")
