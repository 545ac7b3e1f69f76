"""Blocks of a real client, each as a payload and run by a generation under a Protector.

Usage: blocks.py GENERATION FOLDER RWKV; PYTHONPATH selects nnsight. The program prints one JSON object with
the saved values or the error text of each block. RWKV is the folder of a model with modules named `output`.
"""

# ruff: noqa: F841, B018 - names that a trace binds are read after it

from __future__ import annotations

import json
import math
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nnsight
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.schema.request import RequestModel

from ndif.runtime.generations import BlockError, ClientStream, PayloadError, create_generation
from ndif.runtime.spec import ModelSpec
from ndif.sandbox.protector import Protector

GENERATION, FOLDER, RWKV = sys.argv[1:]
PROMPT = "The Eiffel Tower is in the city of"

if GENERATION == "0.8":
    from nnsight import TransformersModel

    CLIENT = TransformersModel(FOLDER, task="text-generation")
else:
    from nnsight import LanguageModel
    from nnsight.intervention.backends.base import Backend

    CLIENT = LanguageModel(FOLDER)


class Capture:
    """A backend that keeps the payload."""

    payload = b""

    def __call__(self, tracer: Any) -> None:
        if GENERATION == "0.8":
            self.payload = RequestModel.serialize(tracer)
        else:
            function = Backend()(tracer)
            self.payload = RequestModel(interventions=function, tracer=tracer).serialize()


@dataclass
class Scale:
    factor: float = 2.0

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor


def centred(value: torch.Tensor) -> torch.Tensor:
    return value - value.mean()


def reads(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        found = [].save()
        for layer in model.transformer.h:
            layer.output[:, 0] = 0
            found.append(round(float(layer.output.norm()), 3))
        shape = nnsight.save(tuple(model.lm_head.output.shape))


def calls(model: Any, backend: Any) -> None:
    scale = Scale(3.0)
    with model.trace(PROMPT, backend=backend):
        hidden = centred(scale.apply(model.transformer.h[0].output))
        found = nnsight.save(round(float(hidden.abs().sum()), 2) > 0)
        two = nnsight.save([math.sqrt(4), round(float(hidden.mean()), 3) + 0.0])
        path = nnsight.save(model.get("transformer.h.1").path)


def weights(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        weight = model.lm_head.weight
        weight.data[:] = 0
        again = model.lm_head.weight is weight
        total = nnsight.save([again, float(model.lm_head.output.abs().sum()) > 0])
        words = nnsight.save([len(model.tokenizer("Paris")["input_ids"]) > 0, model.config.n_layer])


def generates(model: Any, backend: Any) -> None:
    with model.generate(PROMPT, max_new_tokens=2, do_sample=False, backend=backend) as tracer:
        found = [].save()
        for _ in tracer.iter[:2]:
            found.append(int(model.lm_head.output[0, -1].argmax()) >= 0)


def imports(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        hidden = model.transformer.h[0].output
        os.getcwd()  # noqa: PTH109


def walks(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model._module.__class__


def walks_in_an_invoke(model: Any, backend: Any) -> None:
    with model.trace(backend=backend) as tracer:  # noqa: SIM117
        with tracer.invoke(PROMPT):
            model.transformer.h[0].output.save()
            torch.save


def steals(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.interleaver


def indexes(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model["_module"]


def indexes_by_a_method(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.transformer.h.__getitem__(0)
        type(model).__getitem__(model, "interleaver")


def indexes_by_an_operator(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        operator.itemgetter(0)(model.transformer.h)
        operator.getitem(model, "interleaver")


def moves(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.transformer.to("cpu")


def hooks(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.lm_head.register_forward_hook(print)


def assigns(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.lm_head.weight = 1


def configures(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.config.n_layer = 1


def tokenizes(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.tokenizer.save_pretrained("/tmp/x")


def pads(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.tokenizer.padding_side = "right"


def names_a_method(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, fn="save_pretrained", backend=backend):
        model.lm_head.output.save()


class Mine(torch.nn.Module):
    def forward(self, value: Any) -> Any:
        return value.__class__


def instruments(model: Any, backend: Any) -> None:
    mine = Mine()
    with model.trace(PROMPT, backend=backend):
        Envoy(mine).source


def forges(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):

        class Forged(Envoy):
            def __init__(self) -> None:
                self._module = "{0.__class__.__mro__}"
                self._alias = None

        Forged().format(1)


def follows_a_path(model: Any, backend: Any) -> None:
    """Set a module's `__path__`, which nnsight 0.6 and 0.7 follow."""
    mine, child = Mine(), Mine()
    with model.trace(PROMPT, backend=backend):
        envoy = Envoy(mine)
        child.__path__ = " " * len(envoy.path) + "__init__.__globals__"
        mine.child = child
        found = nnsight.save(type(envoy.child).__name__)


def helper(value: torch.Tensor) -> Any:
    return value.__class__


def calls_what_walks(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        helper(model.lm_head.output)


def binds(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        hidden = model.lm_head.output
        __builtins__ = {}


def has_an_attachment(model: Any, backend: Any) -> None:
    """Attach a module, to which every later request refers."""
    if GENERATION != "0.8":
        model.transformer.h[0].attachment = Mine()
    with model.trace(PROMPT, backend=backend):
        found = nnsight.save(tuple(model.lm_head.output.shape))


def calls_an_attachment(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        model.transformer.h[0].attachment(model.transformer.h[0].output)


def reads_an_attachment(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        found = model.transformer.h[0].attachment.output.save()


BLOCKS: list[Callable[[Any, Any], None]] = [
    reads,
    calls,
    weights,
    generates,
    imports,
    walks,
    walks_in_an_invoke,
    steals,
    indexes,
    indexes_by_a_method,
    indexes_by_an_operator,
    moves,
    hooks,
    assigns,
    configures,
    tokenizes,
    pads,
    calls_what_walks,
    binds,
    names_a_method,
    instruments,
    forges,
    follows_a_path,
    has_an_attachment,
    calls_an_attachment,
    reads_an_attachment,
]


def attends(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        weights = model.transformer.h[0].attn.output[1]
        found = [weights.shape[1], bool(torch.allclose(weights.sum(-1), torch.ones(())))].save()


def reads_a_part_called_output(model: Any, backend: Any) -> None:
    with model.trace(PROMPT, backend=backend):
        attention = model.rwkv.blocks[0].attention
        part = attention.output.output
        whole = attention.nns_output[0]
        found = [len(part.shape), bool(torch.equal(part, whole))].save()


TWICE = (reads, calls, has_an_attachment, calls_an_attachment)
"""Blocks that also run without a policy."""


def main() -> None:
    generation = create_generation(GENERATION)
    task = "text-generation" if GENERATION == "0.8" else None
    generation.load(ModelSpec(FOLDER, GENERATION, task=task))
    protector = Protector()
    silent = ClientStream(send=lambda data: None, receive=lambda: b"")
    results = {}
    for block in BLOCKS:
        capture = Capture()
        try:
            block(CLIENT, capture)
        except Exception as error:
            if not capture.payload:
                results[block.__name__] = f"no payload: {error!r}"
                continue
        for policy in (protector, None) if block in TWICE else (protector,):
            name = block.__name__ if policy else f"{block.__name__} unguarded"
            try:
                results[name] = generation.run(capture.payload, silent, policy)
            except BlockError as error:
                results[name] = error.traceback
            except PayloadError as error:
                results[name] = str(error)
            generation.forget()
    # Clients of 0.8.1 name their model's attention; these three do not.
    eager = create_generation(GENERATION)
    eager.load(ModelSpec(FOLDER, GENERATION, task=task, attn_implementation="eager"))
    capture = Capture()
    attends(CLIENT, capture)
    results["attends"] = eager.run(capture.payload, silent)
    if GENERATION != "0.8":
        rwkv = create_generation(GENERATION)
        rwkv.load(ModelSpec(RWKV, GENERATION))
        capture = Capture()
        reads_a_part_called_output(LanguageModel(RWKV), capture)
        for policy in (protector, None):
            name = f"part called output{'' if policy else ' unguarded'}"
            results[name] = rwkv.run(capture.payload, silent, policy)
            rwkv.forget()
    print(json.dumps(results, default=str))


if __name__ == "__main__":
    main()
