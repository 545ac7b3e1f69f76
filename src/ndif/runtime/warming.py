"""The first forward pass, taken before anybody waits for it."""

from __future__ import annotations

from typing import Any

import torch


def warm_up(model: Any) -> None:
    """Run one token, so that what a first pass imports, builds and maps is there.

    In the zygote its runners share it; in a runner it also starts the thread pool.
    """
    embedding = getattr(model._module, "get_input_embeddings", lambda: None)()
    if isinstance(embedding, torch.nn.Embedding):
        token = torch.zeros((1, 1), dtype=torch.long, device=embedding.weight.device)
        with torch.no_grad():
            model._module(input_ids=token)
