"""nnterp with nnsight 0.7, remotely and in this process: its model, steering, lens and patchscope.

nnterp travels with a block: its classes, which call `super()`, logger, DataLoader and decorated functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnsight
import torch
from comparing import assert_equal
from nnsight import CONFIG
from nnterp import StandardizedTransformer, interventions, nnsight_utils

PROMPTS = ["The Eiffel Tower is in the city of", "Paris is the capital of"]


class Context:
    """The model without weights for remote runs, and with weights for runs in this process."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        CONFIG.API.APIKEY = ""
        self.remote = StandardizedTransformer(name, remote=True)
        self.local = StandardizedTransformer(folder)

    def same(self, block: Callable[[Any, bool], Any]) -> None:
        """Run `block(model, remote)` remotely and locally; the values must be equal."""
        assert_equal(block(self.remote, True), block(self.local, False))


def scenario_the_standardized_model(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPTS, remote=remote):
            size = nnsight.save(model.input_size)
            embedded = model.token_embeddings.save()
            entering = model.mlps_input[0].save()
            hidden = model.layers_output[0].save()
            attention = model.attentions_output[1].save()
            likely = model.next_token_probs.save()
        with model.trace(PROMPTS, remote=remote):
            model.skip_layer(0)
            projected = model.project_on_vocab(model.layers_output[1]).save()
            skipped = nnsight_utils.get_logits(model).save()
        return [size, embedded, entering, hidden, attention, likely, projected, skipped]

    context.same(block)


def scenario_steering(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPTS, remote=remote):
            model.steer([0, 1], torch.ones(model.hidden_size), factor=2.0)
            logits = model.logits.save()
        return logits

    context.same(block)


def scenario_activations(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        last = nnsight_utils.get_token_activations(model, PROMPTS, remote=remote)
        batched = nnsight_utils.collect_token_activations_batched(
            model, PROMPTS * 2, 2, remote=remote
        )
        likely = nnsight_utils.compute_next_token_probs(model, PROMPTS, remote=remote)
        return [last, batched, likely]

    context.same(block)


def scenario_lens_and_patchscope(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        lens = interventions.logit_lens(model, PROMPTS, remote=remote)
        patched = interventions.patchscope_lens(model, PROMPTS, remote=remote)
        target = interventions.repeat_prompt()
        written = interventions.patchscope_generate(
            model, PROMPTS, target, max_length=3, remote=remote
        )
        return [lens, patched, written]

    context.same(block)
