"""Modules whose `.source` a block reads are instrumented before the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ndif.runtime.generations import BlockError, ClientStream
from ndif.runtime.generations.v08 import Nnsight08
from ndif.runtime.spec import ModelSpec
from ndif.sandbox.protector import Protector
from tests.runtime.replica import PROMPT, Sent

STREAM = ClientStream(lambda _: None, lambda: b"")
Block = Callable[[Any, Sent], None]


@pytest.fixture(scope="module")
def loaded(tiny_gpt2: Path) -> Nnsight08:
    adapter = Nnsight08()
    adapter.load(ModelSpec(str(tiny_gpt2), "0.8", task="text-generation"))
    return adapter


@pytest.fixture
def generation(loaded: Nnsight08) -> Iterator[Nnsight08]:
    yield loaded
    loaded.forget()


@pytest.fixture(params=["trusted", "confined"])
def policy(request: pytest.FixtureRequest) -> Protector | None:
    return None if request.param == "trusted" else Protector()


def instrumented(generation: Nnsight08) -> list[str]:
    """Return the names of the instrumented modules."""
    return [
        name
        for name, module in generation.model._module.named_modules()
        if vars(module)["__nnsight__"].sourced
    ]


def sent_of(generation: Nnsight08, block: Block) -> bytes:
    """Return a client's payload. Building it may instrument modules; this is undone here."""
    sent = Sent()
    block(generation.model, sent)
    generation.forget()
    return sent.payload


# Each block first reads a module's `.source` while that module's forward is running.


def by_its_path(model: Any, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        model.transformer.h[0].attn.c_attn.output[:] = 1
        found = model.transformer.h[0].attn.source.attn_output_0.output[0].save()


def by_a_name_of_the_script(model: Any, sent: Sent) -> None:
    layer = model.transformer.h[-1]
    with model.trace(PROMPT, backend=sent):
        layer.attn.c_attn.output[:] = 1
        found = layer.attn.source.attn_output_0.output[0].save()


def by_a_name_of_the_block(model: Any, sent: Sent) -> None:
    layers = [model.transformer.h[0], model.transformer.h[1]]
    with model.trace(PROMPT, backend=sent):
        part = layers[1]
        part = part.attn
        part.c_attn.output[:] = 1
        found = part.source.attn_output_0.output[0].save()


def by_a_number(model: Any, sent: Sent) -> None:
    number = 1
    with model.trace(PROMPT, backend=sent):
        model.transformer.h[number].attn.c_attn.output[:] = 1
        found = model.transformer.h[number].attn.source.attn_output_0.output[0].save()


def in_a_loop(model: Any, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        found = {}.save()
        for number, layer in enumerate(model.transformer.h[:2]):
            layer.attn.c_attn.output[:] = 1
            found[number] = layer.attn.source.attn_output_0.output[0]


def in_a_comprehension(model: Any, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        entering = [(layer.attn.c_attn.output, layer.attn) for layer in model.transformer.h[:1]]
        found = [part.source.attn_output_0.output[0] for _, part in entering].save()


def by_a_path_as_text(model: Any, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        found = [].save()
        for number in range(2):
            part = model.get(f"transformer.h.{number}.attn")
            part.c_attn.output[:] = 1
            found.append(part.source.attn_output_0.output[0])


def attention_of(layer: Any) -> Any:
    layer.attn.c_attn.output[:] = 1
    return layer.attn.source.attn_output_0.output[0]


def in_a_function(model: Any, sent: Sent) -> None:
    with model.trace(PROMPT, backend=sent):
        found = attention_of(model.transformer.h[0]).save()


def in_a_method(model: Any, sent: Sent) -> None:
    # Defined inside the function: in this process, the server's own copy would replace a global class.
    class Reader:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def read(self, model: Any) -> Any:
            model.transformer.h[self.layer].attn.c_attn.output[:] = 1
            return model.transformer.h[self.layer].attn.source.attn_output_0.output[0]

    reader = Reader(1)
    with model.trace(PROMPT, backend=sent):
        found = reader.read(model).save()


def in_a_session(model: Any, sent: Sent) -> None:
    with model.session(backend=sent):
        found = [].save()
        for part in (model.transformer.h[0].attn, model.transformer.h[1].attn):
            with model.trace(PROMPT):
                part.c_attn.output[:] = 1
                found.append(part.source.attn_output_0.output[0])


def in_an_invoke(model: Any, sent: Sent) -> None:
    with model.trace(backend=sent) as tracer:
        with tracer.invoke(PROMPT):
            before = model.transformer.h[0].output.save()
        with tracer.invoke(PROMPT):
            model.transformer.h[0].attn.c_attn.output[:] = 1
            found = model.transformer.h[0].attn.source.attn_output_0.output[0].save()


def in_an_edit(model: Any, sent: Sent) -> None:
    with model.edit() as (_, edited):
        edited.transformer.h[0].attn.c_attn.output[:] = 1
        edited.transformer.h[0].attn.source.attn_output_1.output *= 2
    with edited.trace(PROMPT, backend=sent):
        found = edited.transformer.h[0].output.save()


def a_view_of_the_script(model: Any, sent: Sent) -> None:
    view = model.transformer.h[0].attn.source
    with model.trace(PROMPT, backend=sent):
        model.transformer.h[0].attn.c_attn.output[:] = 1
        found = view.attn_output_0.output[0].save()


def an_operation_of_the_script(model: Any, sent: Sent) -> None:
    operation = model.transformer.h[0].attn.source.attn_output_0
    with model.trace(PROMPT, backend=sent):
        model.transformer.h[0].attn.c_attn.output[:] = 1
        found = operation.output[0].save()


def at_each_token(model: Any, sent: Sent) -> None:
    with model.generate(PROMPT, max_new_tokens=3, backend=sent) as tracer:
        found = [].save()
        for _ in tracer.iter[:3]:
            model.transformer.h[1].attn.c_attn.output[:] = 1
            found.append(model.transformer.h[1].attn.source.attn_output_0.output[0])


BLOCKS = [
    by_its_path,
    by_a_name_of_the_script,
    by_a_name_of_the_block,
    by_a_number,
    in_a_loop,
    in_a_comprehension,
    by_a_path_as_text,
    in_a_function,
    in_a_method,
    in_a_session,
    in_an_invoke,
    in_an_edit,
    a_view_of_the_script,
    an_operation_of_the_script,
    at_each_token,
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_module_source_is_readable_within_its_forward(
    generation: Nnsight08, policy: Protector | None, block: Block
) -> None:
    payload = sent_of(generation, block)
    found = generation.run(payload, STREAM, policy)
    for layer in generation.model.transformer.h:
        _ = layer.attn.source
    torch.testing.assert_close(found, generation.run(payload, STREAM, policy), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("block", "modules"),
    [
        (by_its_path, ["transformer.h.0.attn"]),
        (by_a_name_of_the_script, ["transformer.h.3.attn"]),
        (by_a_number, ["transformer.h.1.attn"]),
        (in_a_method, [f"transformer.h.{number}.attn" for number in range(4)]),
    ],
)
def test_only_modules_named_by_block_are_instrumented(
    generation: Nnsight08, block: Block, modules: list[str]
) -> None:
    generation.run(sent_of(generation, block), STREAM)
    assert instrumented(generation) == modules


def test_the_next_request_finds_no_module_instrumented(generation: Nnsight08) -> None:
    generation.run(sent_of(generation, by_its_path), STREAM)
    generation.forget()
    assert instrumented(generation) == []


def test_source_attribute_of_text_raises_and_instruments_nothing(
    generation: Nnsight08, policy: Protector | None
) -> None:
    sent, other = Sent(), "text"
    with generation.model.trace(PROMPT, backend=sent):
        found = other.source
    with pytest.raises(BlockError, match=r"'str' object has no attribute 'source'"):
        generation.run(sent.payload, STREAM, policy)
    assert instrumented(generation) == []
