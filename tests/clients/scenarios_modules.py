"""Scenarios of modules that a researcher sends, makes or trains in a block, for every generation.

Every generation's scenarios import this module. The same block runs in this process, and must return equal
values.
"""

from __future__ import annotations

import abc
import collections
import copy
import dataclasses
import enum
import sys
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import nnsight
import torch
from comparing import assert_equal
from torch import nn
from torch.nn import functional

PROMPT = "The Eiffel Tower is in the city of"
WIDTH = 64
T = TypeVar("T")

# The classes travel by value, as if the researcher's script defined them.
nnsight.register(sys.modules[__name__])


class Sae(nn.Module):
    """A sparse autoencoder as in papers."""

    scale: torch.Tensor

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, features)
        self.decoder = nn.Linear(features, width, bias=False)
        self.bias = nn.Parameter(torch.randn(width))
        self.register_buffer("scale", torch.tensor(2.0))
        self._features = features

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.encoder(x - self.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encode(x)) * self.scale + self.bias


def seeded(make: Any, *arguments: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return make(*arguments, **options)


def scenario_modules_of_torch_are_sent(context: Any) -> None:
    probe = seeded(nn.Linear, WIDTH, 3)
    activation = nn.ReLU()
    stack = seeded(
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(0.1))
    ).eval()
    attention = seeded(nn.MultiheadAttention, WIDTH, 4, batch_first=True).eval()
    layers = nn.ModuleDict({"a": nn.Identity(), "b": nn.ModuleList([seeded(nn.Linear, 3, 2)])})
    encoder = seeded(nn.TransformerEncoderLayer, WIDTH, 4, 32, batch_first=True).eval()
    recurrent = seeded(nn.GRU, WIDTH, 5, batch_first=True)

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[0].output
            found = nnsight.save(
                [
                    probe(hidden),
                    activation(hidden),
                    stack(hidden),
                    attention(hidden, hidden, hidden)[0],
                    layers["b"][0](layers["a"](probe(hidden))),
                    encoder(hidden),
                    recurrent(hidden)[0],
                    probe.weight,
                ]
            )
        return found

    context.same(block)


def scenario_a_class_of_the_script_is_sent(context: Any) -> None:
    sae = seeded(Sae, WIDTH, 128)

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[1].output
            features = nnsight.save(sae.encode(hidden))
            model.transformer.h[1].output = sae(hidden)
            logits = nnsight.save(model.lm_head.output)
            names = nnsight.save([name for name, _ in sae.named_parameters()])
            scale = nnsight.save(dict(sae.named_buffers())["scale"])
        return [features, logits, names, scale]

    context.same(block)


def scenario_a_module_with_hooks_of_its_own(context: Any) -> None:
    probe = seeded(nn.Linear, WIDTH, 3)
    probe.register_forward_hook(lambda _, inputs, output: output + inputs[0].mean())
    probe.register_forward_pre_hook(doubled)
    probe.note = {"layer": 1}

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            found = nnsight.save([probe(model.transformer.h[0].output), probe.note["layer"]])
        return found

    context.same(block)


def doubled(_: Any, inputs: Any) -> Any:
    return (inputs[0] * 2,)


def scenario_a_probe_is_trained_in_a_block(context: Any) -> None:
    def block(model: Any, remote: bool) -> Any:
        probe = seeded(nn.Linear, WIDTH, 2)
        targets = torch.zeros(1, dtype=torch.long)
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[1].output.detach()[:, -1]
            optimizer = torch.optim.Adam(probe.parameters(), lr=0.1)
            losses = nnsight.save([])
            for _ in range(3):
                optimizer.zero_grad()
                loss = functional.cross_entropy(probe(hidden), targets)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(probe.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            state = nnsight.save(probe.state_dict())
        return [losses, list(state), *state.values()]

    losses, *_ = context.same(block)
    assert losses[2] < losses[0]


def scenario_modules_come_back(context: Any) -> None:
    probe = seeded(nn.Linear, WIDTH, 2)
    sae = seeded(Sae, WIDTH, 4)
    expected = [probe.weight.data * 2, sae.bias.data.double()]
    with context.remote.trace(PROMPT, remote=True):
        probe.requires_grad_(False)
        probe.weight.mul_(2)
        scaled = nnsight.save(probe)
        same = nnsight.save(sae.double())
    assert type(scaled) is nn.Linear
    assert_equal([scaled.weight.data, same.bias.data], expected)


def scenario_a_module_of_the_model_is_sent(context: Any) -> None:
    def block(model: Any, remote: bool) -> Any:
        layer, norm = model.transformer.h[1], model.transformer.ln_f
        heads = [norm, model.lm_head]
        with model.trace(PROMPT, remote=remote):
            hidden = layer.output
            logits = hidden
            for head in heads:
                logits = head(logits)
            found = nnsight.save(logits)
        return found

    context.same(block)


@dataclasses.dataclass
class Steering:
    layer: int
    vector: torch.Tensor
    scale: float = 3.0
    kind: ClassVar[str] = "added"
    tags: list[str] = dataclasses.field(default_factory=list)

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * self.vector


def scenario_a_dataclass_of_the_script(context: Any) -> None:
    steering = Steering(1, torch.full((WIDTH,), 0.5), tags=["a"])

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            layer = model.transformer.h[steering.layer]
            layer.output = steering.apply(layer.output)
            found = nnsight.save([model.lm_head.output, steering.tags, copy.copy(steering).scale])
            made = nnsight.save([Steering(2, steering.vector).layer, Steering.kind])
        return [found, made]

    context.same(block)


def scenario_what_a_trace_gave_back_is_sent_again(context: Any) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            cache = nnsight.save(model.output.past_key_values)
        with model.trace(PROMPT, remote=remote):
            output = nnsight.save(model.output)
        with model.trace(" and", past_key_values=cache, remote=remote):
            logits = nnsight.save(model.lm_head.output)
            same = nnsight.save(output.logits + 0)
        return [logits, same]

    context.same(block)


@runtime_checkable
class Scales(Protocol):
    def scale(self, value: torch.Tensor) -> torch.Tensor: ...


class Scaled(Generic[T], abc.ABC):
    def __init__(self, factor: T) -> None:
        self.factor = factor

    @abc.abstractmethod
    def scale(self, value: torch.Tensor) -> torch.Tensor: ...


class Doubled(Scaled[float]):
    def scale(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor * 2


@dataclasses.dataclass
class Chosen(Generic[T]):
    layers: list[int] = dataclasses.field(default_factory=list)

    def first(self) -> int:
        return self.layers[0]


class Way(str, enum.Enum):
    MEAN = "mean"


def scenario_classes_of_typing_are_sent(context: Any) -> None:
    doubled, chosen, way = Doubled(1.5), Chosen([1]), Way.MEAN

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[chosen.first()].output
            found = nnsight.save([doubled.scale(hidden), Doubled(2.0).scale(hidden)])
            told = nnsight.save(
                [isinstance(doubled, Scales), isinstance(1, Scales), Chosen([3]).first()]
            )
            named = nnsight.save([way == "mean", Way("mean") is way])
        return [found, told, named]

    context.same(block)


def scenario_what_a_block_makes_comes_back(context: Any) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            Pair = collections.namedtuple("Pair", "one other")
            found = nnsight.save([Pair(model.lm_head.output.mean().item(), 2), type, getattr])
        return found

    (remote, *classes), (local, *_) = block(context.remote, True), block(context.local, False)
    assert remote._asdict() == local._asdict()
    assert classes == [type, getattr]


def weights_that_a_block_writes_are_its_own(context: Any) -> None:
    """For trusted users: a session sees the weights that it writes, and the next request does not."""
    model = context.remote

    def block(model: Any, remote: bool) -> Any:
        with model.session(remote=remote):
            weight = model.lm_head.weight
            with torch.no_grad():
                weight *= 2
            with model.trace(PROMPT):
                twice = model.lm_head.output.save()
            with torch.no_grad():
                weight /= 2
        return twice

    context.same(block)
    with model.session(remote=True):
        with torch.no_grad():
            model.lm_head.weight.zero_()
        model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
        with model.trace(PROMPT):
            nothing = model.lm_head.output.save()
    assert not nothing.any()

    def reading(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            logits = model.lm_head.output.save()
        return logits

    context.same(reading)
