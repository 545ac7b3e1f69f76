"""A node's resources: declared, taken, given back."""

from __future__ import annotations

import pytest

from ndif.config.units import parse_gpus
from ndif.placement.demand import Demand, PlacementRules
from ndif.placement.resources import Resources

GiB = 1024**3


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("2x24GiB", (24 * GiB,) * 2),
        ("1x80GiB,2x24GiB", (80 * GiB, 24 * GiB, 24 * GiB)),
        (" 1 x 80 gib , 24GiB ", (80 * GiB, 24 * GiB)),
        ("1x23.5GiB", (int(23.5 * GiB),)),
        ("1x80GB", (80 * 10**9,)),
        ("3x512MiB", (512 * 1024**2,) * 3),
        (f"2x{24 * GiB}", (24 * GiB,) * 2),
        ("", ()),
        (" ", ()),
        ("0", ()),
    ],
)
def test_gpu_declaration_is_parsed(text: str, gpus: tuple[int, ...]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize(
    "text",
    [
        *("two", "2x", "x24GiB", "2x24Gi", "2*24GiB", "2x24GiB,", ",", "-1x24GiB", "2x-24GiB"),
        *("0x24GiB", "2x0GiB", "2x24GiB;1x80GiB", "1025x1GiB", "1024x1GiB,1x1GiB", "9" * 40),
        *("1x1024", "2", "24", "2x24", "2x1e3GiB", "2x24GiB 1x80GiB", "2x.5GiB", "٢x24GiB" * 99),
    ],
)
def test_invalid_gpu_declaration_is_rejected_with_example(text: str) -> None:
    with pytest.raises(ValueError, match="2x24GiB, or 1x80GiB,2x24GiB"):
        parse_gpus(text)


def test_part_of_cpu_memory_is_reserved_for_other_programs() -> None:
    assert Resources.of((), 1000).cpu_bytes == 900
    assert Resources.of((), 1000, 0.5).free_cpu_bytes == 500


def test_taken_memory_is_free_again_once_given_back() -> None:
    resources = Resources.of((80, 24), 1000, 1.0)
    taken = resources.taken({1: 24}, 400)
    assert (taken.free_gpu_bytes, taken.free_cpu_bytes) == ((80, 0), 600)
    assert taken.given_back({1: 24}, 400) == resources == taken.emptied()


@pytest.mark.parametrize(("gpus", "cpu"), [({0: 81}, 0), ({}, 1001)])
def test_memory_cannot_be_taken_or_given_back_twice(gpus: dict[int, int], cpu: int) -> None:
    resources = Resources.of((80, 24), 1000, 1.0)
    with pytest.raises(ValueError, match="free"):
        resources.taken(gpus, cpu)
    with pytest.raises(ValueError, match="free"):
        resources.given_back(gpus or {0: 1}, cpu)


@pytest.mark.parametrize(
    "changed",
    [
        {"fraction_largest_possible": 1.0},
        {"fraction_largest_possible": 0.0},
        {"min_available_gpu_fraction": 1.5},
        {"gpu_fraction_factor": 1.0},
        {"minimum_deployment_time_s": -1.0},
    ],
)
def test_contradictory_placement_rules_are_rejected(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changed)).split("_")[0]):
        PlacementRules(**changed)


def test_demand_without_size_or_with_negative_replicas_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Demand("m", 0)
    with pytest.raises(ValueError, match="-1 replicas"):
        Demand("m", 1, -1)


def test_gpu_uuids_must_be_given_for_all_gpus_or_none() -> None:
    named = Resources.of((80, 24), 0, 1.0, ["GPU-1", "GPU-2"])
    assert named.gpu_uuids == ("GPU-1", "GPU-2")
    assert named.taken({0: 80}, 0).emptied() == named
    # Another card in the same slot is another machine.
    assert named != Resources.of((80, 24), 0, 1.0, ["GPU-1", "GPU-3"])
    with pytest.raises(ValueError, match="cannot have 1 UUIDs"):
        Resources.of((80, 24), 0, 1.0, ["GPU-1"])
