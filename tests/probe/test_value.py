"""The check of a value: wrong values, and rounding differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ndif.probe.outcome import ProbeOutcome, Value
from ndif.probe.probe import Target
from ndif.probe.trace import _value, _why_wrong
from ndif.schema.states import ProbeKind

Saved = dict[str, Any]

WIDTH, TOP, VOCABULARY = 64, 5, 512


def saved(dtype: torch.dtype = torch.float32, seed: int = 0) -> Saved:
    """Return the values that a probe's trace saves, for a head with random weights."""
    torch.manual_seed(seed)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64).to(dtype)
    hidden = torch.randn(WIDTH, dtype=torch.float64).to(dtype)
    bias = torch.randn(VOCABULARY, dtype=torch.float64).to(dtype)
    scores = (weight.float() @ hidden.float() + bias.float()).to(dtype)
    best = scores.topk(TOP)
    return {
        "hidden": hidden,
        "shape": torch.tensor([VOCABULARY]),
        "is_finite": scores.isfinite().all(),
        "values": best.values,
        "tokens": best.indices,
        "sampled": scores[:: VOCABULARY // 64],
        "rows": weight[best.indices],
        "added": bias[best.indices],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_computed_value_is_right(dtype: torch.dtype, seed: int) -> None:
    value = _value(saved(dtype, seed))
    assert _why_wrong(saved(dtype, seed), value) is None
    assert (value.shape, len(value.tokens)) == ((VOCABULARY,), TOP)


def scale(name: str, by: float) -> Callable[[Saved], None]:
    def change(value: Saved) -> None:
        value[name] = value[name] * by

    return change


def turn(value: Saved) -> None:
    value["values"] = value["values"].flip(0)


def swap_two_numbers(value: Saved) -> None:
    value["hidden"][[0, 1]] = value["hidden"][[1, 0]]


def spoil(value: Saved) -> None:
    value["is_finite"] = torch.tensor(False)


def cut(value: Saved) -> None:
    value["rows"] = value["rows"][:, :-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scale("values", 1.1), "do not match the hidden state"),
        (scale("hidden", 0.0), "do not match the hidden state"),
        (scale("rows", -1.0), "do not match the hidden state"),
        (scale("hidden", float("nan")), "do not match the hidden state"),
        (turn, "do not match the hidden state"),
        (swap_two_numbers, "do not match the hidden state"),
        (spoil, "not finite"),
        (cut, "another shape"),
    ],
)
def test_changed_value_is_wrong(
    change: Callable[[Saved], None], reason: str, dtype: torch.dtype
) -> None:
    value = saved(dtype)
    change(value)
    assert reason in str(_why_wrong(value, _value(value)))


# Against the first value of a model


def value(seed: int = 0, noise: float = 0.0, dtype: torch.dtype = torch.float32) -> Value:
    torch.manual_seed(seed)
    numbers = torch.randn(64, dtype=torch.float64)
    torch.manual_seed(seed + 1000)
    numbers = numbers * (1 + noise * torch.randn(64, dtype=torch.float64))
    tolerance = 1e-3 if dtype is torch.float32 else 3e-2
    return Value((VOCABULARY,), str(dtype), tolerance, tuple(numbers.tolist()), (1, 2, 3))


def test_rounding_difference_is_accepted() -> None:
    assert value(noise=1e-4).differs_from(value()) is None
    assert value(noise=1e-2, dtype=torch.bfloat16).differs_from(value()) is None


def test_different_numbers_or_shape_are_reported() -> None:
    assert "differs from the first probe" in str(value(noise=1e-2).differs_from(value()))
    assert value(1, dtype=torch.bfloat16).differs_from(value(dtype=torch.bfloat16)) is not None
    shorter = Value((VOCABULARY - 1,), "float32", 1e-3, value().numbers, ())
    assert "shape" in str(shorter.differs_from(value()))


def test_outcome_is_wrong_if_it_differs_from_first_value() -> None:
    ok = ProbeOutcome(ProbeKind.OK, seconds=0.5, value=value(1))
    assert ok.against(None) is ok
    assert ok.against(value(1)) is ok
    wrong = ok.against(value(2))
    assert (wrong.kind, wrong.failed, wrong.seconds) == (ProbeKind.WRONG, True, 0.5)
    refused = ProbeOutcome(ProbeKind.ERROR, "It was refused.")
    assert refused.against(value()) is refused


@pytest.mark.parametrize("kind", ProbeKind)
def test_only_ok_loading_and_unsupported_outcomes_have_not_failed(kind: ProbeKind) -> None:
    fine = (ProbeKind.OK, ProbeKind.LOADING, ProbeKind.UNSUPPORTED)
    assert ProbeOutcome(kind).failed is (kind not in fine)


def test_target_label_contains_revision() -> None:
    assert Target("org/name", None, None, "0.8").label == "org/name"
    assert Target("org/name", "v1", None, "0.8").label == "org/name@v1"
