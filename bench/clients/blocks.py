"""Blocks that the benchmarks' clients run by name, in their own process or on a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

PROMPT = "The Eiffel Tower is in the city of"
MB = 1 << 20
OLDER = not version("nnsight").startswith("0.8")

if OLDER:
    from nnsight import CONFIG, LanguageModel

    load = LanguageModel
else:
    from nnsight import TransformersModel
    from nnsight.schema.config import CONFIG

    load = partial(TransformersModel, task="text-generation")

CONFIG.APP.REMOTE_LOGGING = False
# The same number as a server's models.
torch.set_num_threads(os.cpu_count() or 1)


def small(model: Any, **how: Any) -> None:
    """Read one layer and the last logits."""
    with model.trace(PROMPT, **how):
        hidden = model.model.layers[5].output.save()
        logits = model.lm_head.output[:, -1].save()
    assert hidden.shape[-1] == 576
    assert logits.shape[-1] == 49152


def tiny(model: Any, **how: Any) -> None:
    """Read one layer of a tiny GPT-2."""
    with model.trace(PROMPT, **how):
        hidden = model.transformer.h[2].output.save()
    assert hidden.shape[-1] == 64


def every_layer(model: Any, **how: Any) -> None:
    """Read every layer, and edit ten of them."""
    with model.trace(PROMPT, **how):
        hidden = [].save()
        for number, layer in enumerate(model.model.layers):
            if number % 3 == 0:
                layer.output[:, -1] *= 0.5
            hidden.append(layer.output)
    assert len(hidden) == 30


def generation(model: Any, **how: Any) -> None:
    """Generate 64 tokens, and read a layer at each."""
    with model.generate(PROMPT, max_new_tokens=64, min_new_tokens=64, **how) as tracer:
        hidden = [].save()
        with tracer.iter[:]:
            hidden.append(model.model.layers[5].output[:, -1])
    assert len(hidden) == 64


def series(model: Any, **how: Any) -> None:
    """Run twenty traces without pauses."""
    for _ in range(20):
        small(model, **how)


def session(model: Any, **how: Any) -> None:
    """Run twenty traces as one request."""
    with model.session(**how):
        logits = [].save()
        for _ in range(20):
            with model.trace(PROMPT):
                logits.append(model.lm_head.output[:, -1])
    assert len(logits) == 20


def large(size: int, model: Any, **how: Any) -> None:
    """Return `size` bytes of bfloat16 that compress like a model's weights."""
    count = size // 2
    with model.trace(PROMPT, **how):
        weight = model.lm_head.weight.detach().flatten()
        values = torch.empty(count, dtype=weight.dtype).save()
        for start in range(0, count, weight.numel()):
            values[start : start + weight.numel()] = weight[: count - start]
    assert values.numel() == count
    assert values.dtype is torch.bfloat16


def many_large(model: Any, **how: Any) -> None:
    """Return ten results of 16 MB, without pauses."""
    for _ in range(10):
        large(16 * MB, model, **how)


Block = Callable[..., None]
BLOCKS: dict[str, Block] = {
    **{
        block.__name__: block
        for block in (small, tiny, every_layer, generation, series, session, many_large)
    },
    **{f"large-{size}": partial(large, size * MB) for size in (1, 64, 256)},
}
