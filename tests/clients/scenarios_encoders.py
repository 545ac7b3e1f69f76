"""Traces of models other than causal language models, run remotely and in this process."""

from __future__ import annotations

from typing import Any

import torch
from comparing import assert_equal
from nnsight import TransformersModel
from nnsight.schema.config import CONFIG


class Context:
    """The model on the server, by its name, and in this process, from its folder."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        self.name = name
        self.folder = folder

    def both(self, task: str) -> list[tuple[Any, bool]]:
        """Return the remote and the local model, each with True if it is remote."""
        local = TransformersModel(self.folder, task=task, dispatch=True)
        return [(TransformersModel(self.name, task=task), True), (local, False)]


def scenario_fills_a_mask(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace("The Eiffel Tower is in [MASK].", remote=remote):
            hidden = model.bert.encoder.layer[0].output.save()
            model.bert.encoder.layer[1].output[:] *= 2
            logits = model.cls.output.save()
        return [hidden, logits]

    remote, local = (block(*where) for where in context.both("fill-mask"))
    assert_equal(remote, local)


def scenario_has_no_text_to_go_on_with(context: Context) -> None:
    """A model that needs more than a text: its decoder needs an input, too."""
    tokens = torch.arange(5)[None]

    def block(model: Any, remote: bool) -> Any:
        with model.trace({"input_ids": tokens, "decoder_input_ids": tokens[:, :2]}, remote=remote):
            encoded = model.encoder.output[0].save()
            decoded = model.decoder.block[1].output[0].save()
        return [encoded, decoded]

    remote, local = (block(*where) for where in context.both("feature-extraction"))
    assert_equal(remote, local)
