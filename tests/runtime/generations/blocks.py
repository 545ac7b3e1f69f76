"""Blocks of nnsight 0.8: some can be co-batched, others must run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nnsight import TransformersModel

from tests.runtime.replica import Sent

PROMPT, AS_LONG, LONGER = "The Eiffel Tower is in", "The Tower Eiffel is in", "Paris " * 9
Block = Callable[[TransformersModel, Sent], None]


def layers(model: TransformersModel) -> Any:
    return model.transformer.h if hasattr(model._module, "transformer") else model.model.layers


def reads(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent):
        hidden = parts[1].output.save()
        entering = parts[2].input.save()
        attention = parts[2].mlp.output[0].save()
        logits = model.lm_head.output.save()


def edits(model: TransformersModel, sent: Sent) -> None:
    parts, vector = layers(model), torch.linspace(-1, 1, 64)
    with model.trace(AS_LONG, backend=sent):
        parts[0].output[:, -1] = 0
        before = parts[1].output.save()
        parts[1].output += 5 * vector
        parts[1].output[:, 0] = 1
        parts[2].mlp.output *= -1
        logits = model.lm_head.output.save()


def assigns(model: TransformersModel, sent: Sent) -> None:
    parts, vector = layers(model), torch.linspace(-1, 1, 64)
    with model.trace(AS_LONG, backend=sent):
        before = parts[0].output.save()
        after = (before * 2 + vector).save()
        parts[0].output = after
        parts[1].input = parts[1].input - 1
        parts[2].mlp.output = -parts[2].mlp.output
        logits = model.lm_head.output.save()


def loops(model: TransformersModel, sent: Sent) -> None:
    parts, norms = layers(model), []
    with model.trace(PROMPT, backend=sent):
        seen = {}
        for index, layer in enumerate(parts):
            norms.append(layer.output.norm().item())
            seen[f"layer {index}"] = layer.output[:, -1]
        norms.save()
        seen.save()


def a_lens(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace([PROMPT, PROMPT], backend=sent):
        early = torch.softmax(model.lm_head(parts[1].output)[:, -1], -1).topk(3).indices.save()
        token = model.lm_head.output[:, -1].argmax(-1).tolist()
        both = [token, len(parts)].save()


ROW_WISE = [reads, edits, loops, a_lens]
ASSIGNING = [assigns]


def longer(model: TransformersModel, sent: Sent) -> None:
    with model.trace(LONGER, backend=sent):
        logits = model.lm_head.output.save()


def prints(model: TransformersModel, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        print("here")
        logits = model.lm_head.output.save()


def generates(model: TransformersModel, sent: Sent) -> None:
    with model.generate(PROMPT, max_new_tokens=2, backend=sent) as tracer:
        tokens = tracer.result.save()


def invokes(model: TransformersModel, sent: Sent) -> None:
    with model.trace(backend=sent) as tracer:
        with tracer.invoke(PROMPT):
            logits = model.lm_head.output.save()


def stops(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent) as tracer:
        hidden = parts[0].output.save()
        tracer.stop()


def writes_a_weight(model: TransformersModel, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        model.lm_head.weight.data[0, 0] += 0
        logits = model.lm_head.output.save()


def takes_the_cache(model: TransformersModel, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        everything = model.output.save()


def with_options(model: TransformersModel, sent: Sent) -> None:
    with model.trace(PROMPT, use_cache=False, backend=sent):
        logits = model.lm_head.output.save()


def fills_a_list_of_the_script(model: TransformersModel, sent: Sent) -> None:
    found: list[Any] = []
    with model.trace(PROMPT, backend=sent):
        found.append(model.lm_head.output)
        logits = model.lm_head.output.save()


def writes_into_what_it_assigned(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent):
        hidden = (parts[0].output * 2).save()
        parts[0].output = hidden
        hidden[:, -1] = 0
        logits = model.lm_head.output.save()


def sum(values: Any) -> int:
    """A function of the script that shadows a Python builtin."""
    return 7


def calls_its_own(model: TransformersModel, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        number = [sum(model.lm_head.output)].save()


def hooks_a_module(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent):
        early = model.lm_head(parts[0].output, hook=True).save()


def takes_all_but_a_row(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace([PROMPT, PROMPT], backend=sent):
        parts[1].output = parts[1].output[:1]
        logits = model.lm_head.output.save()


def widens(model: TransformersModel, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        model.lm_head.output = model.lm_head.output.double()
        logits = model.lm_head.output.save()


def saves_what_torch_has_a_class_for(model: TransformersModel, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        top = model.lm_head.output.topk(3).save()


OTHERS = [
    saves_what_torch_has_a_class_for,
    writes_into_what_it_assigned,
    calls_its_own,
    hooks_a_module,
    takes_all_but_a_row,
    widens,
    prints,
    generates,
    invokes,
    stops,
    writes_a_weight,
    takes_the_cache,
    with_options,
    fills_a_list_of_the_script,
]


def fails(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent):
        hidden = parts[0].output[7, 7, 7].save()


def waits_for_the_past(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent):
        late = parts[2].output.save()
        early = parts[0].output.save()


def has_another_shape(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent):
        parts[0].output = torch.zeros(1, 1, 3)
        logits = model.lm_head.output.save()


def expands(model: TransformersModel, sent: Sent) -> None:
    """A block that saves views whose storage differs in size from their elements."""
    with model.trace(PROMPT, backend=sent):
        last = model.lm_head.output[:, -1:].expand(-1, 64, -1).save()
        turned = model.lm_head.output.transpose(1, 2).save()


def frees_what_it_saved(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent):
        for layer in parts:
            hidden = (layer.output * 2).save()


def saves_little(model: TransformersModel, sent: Sent) -> None:
    parts = layers(model)
    with model.trace(PROMPT, backend=sent):
        kept = [layer.output * 3 for layer in parts]
        other = parts[-1].output * 2
        one = parts[-1].output[0, 0, 0].item()
        mean = model.lm_head.output.mean().save()
