"""A client of nnsight 0.8 gets the same values from a GPU on the server as from its own process."""

from __future__ import annotations

from typing import Any

import torch
from nnsight.intervention.backends.remote import RemoteError
from scenarios_08 import PROMPT, Context

__all__ = ["Context"]


def close(context: Context, block: Any) -> None:
    """Run `block(model, remote)` both ways; allow a tolerance, as GPU and CPU round differently."""
    for remote, local in zip(block(context.remote, True), block(context.local, False), strict=True):
        torch.testing.assert_close(remote.cpu(), local.cpu(), rtol=1e-3, atol=1e-4)


def scenario_reads_and_edits(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[1].output.save()
            model.transformer.h[2].mlp.output[:] = 0
            logits = model.lm_head.output.save()
        return [hidden, logits]

    close(context, block)


def scenario_generation(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.generate(PROMPT, max_new_tokens=4, do_sample=False, remote=remote) as tracer:
            ids = tracer.result.save()
        return [ids]

    close(context, block)


def scenario_gradients(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[1].output
            with model.lm_head.output.sum().backward():
                grad = hidden.grad.save()
        return [grad]

    close(context, block)


def scenario_the_weights_are_on_the_gpu(context: Context) -> None:
    with context.remote.trace(PROMPT, remote=True):
        kinds = {
            tensor.device.type
            for tensor in [
                *context.remote._module.parameters(),
                *context.remote._module.buffers(),
                context.remote.lm_head.output,
            ]
        }
        tied = context.remote.lm_head.weight is context.remote.transformer.wte.weight
        found = [kinds, tied]
        found.save()
    assert found == [{"cuda"}, True]


def scenario_a_crash(context: Context) -> None:
    import os

    try:
        with context.remote.trace(PROMPT, remote=True):
            os.kill(os.getpid(), 11)
    except RemoteError as error:
        assert "SIGSEGV" in str(error)  # noqa: PT017 - the `else` covers a missing error
    else:
        raise AssertionError("no error came")


def scenario_weights_are_overwritten(context: Context) -> None:
    """Overwrite all weights; the server must run without the Protector, which would reject this block."""
    with context.remote.trace(PROMPT, remote=True):
        for parameter in context.remote._module.parameters():
            parameter.data.zero_()
        logits = context.remote.lm_head.output.save()
    assert not logits.any()
