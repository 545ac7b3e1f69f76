"""The choice of GPUs of a local server."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.cluster.fleet import LocalCards, choose
from ndif.config.settings import Settings
from ndif.host.evaluation import EvaluationError, Measured
from ndif.host.fork_server import ForkServers
from ndif.host.gpus import Driver
from ndif.host.runtimes import Runtime, Runtimes
from ndif.schema.deployment import DeploymentConfig
from tests.host.machines import GB10, H100, MIXED, Machine
from tests.on_loop import on_loop

pytestmark = pytest.mark.process

MIB = 1 << 20
CONTEXT = 3 * Settings().gpu_context_bytes
"""The CUDA contexts of the owner and the two runners of a trusted user."""


def test_fitting_gpu_with_least_free_memory_is_chosen() -> None:
    assert choose([80, 24, 48], [80, 24, 48], 20, 1) == {1: 23}
    assert choose([80, 24, 48], [80, 20, 48], 20, 1) == {2: 47}
    assert choose([80, 80], [70, 30], 29, 1) == {1: 79}


def test_fewest_gpus_that_fit_model_are_chosen() -> None:
    assert choose([24] * 4, [24, 24, 20, 24], 40, 2) == {1: 22, 2: 18}
    assert choose([24] * 4, [24, 24, 20, 24], 41, 2) == {0: 22, 1: 22}
    assert choose([24] * 4, [24, 10, 20, 10], 40, 2) == {0: 22, 2: 18}
    assert choose([24, 80, 24], [24, 80, 24], 90, 1) == {0: 23, 1: 79}


def test_no_gpu_is_chosen_if_all_together_are_too_small() -> None:
    assert choose([24, 24], [24, 24], 48, 1) is None
    assert choose([24, 24], [1, 0], 1, 1) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(1, 150), st.integers(0, 9))
def test_chosen_gpus_fit_model_and_fewer_do_not(free: list[int], size: int, context: int) -> None:
    room = sorted((max(0, free_bytes - context) for free_bytes in free), reverse=True)
    chosen = choose([60] * len(free), free, size, context)
    if chosen is None:
        assert sum(room) < size
        return
    held = sum(max(0, free[index] - context) for index in chosen)
    assert held >= size
    assert sum(room[: len(chosen) - 1]) < size


# With a driver and a stand-in for the evaluator


class Knows:
    """An evaluator that needs no process."""

    def __init__(self, size: int, *, cuda: bool = True) -> None:
        self.size = size
        self.cuda = cuda

    async def __call__(self, config: DeploymentConfig, runtime: Runtime) -> Measured:
        if not self.size:
            raise EvaluationError("it has no config")
        return Measured(self.size, cuda=self.cuda)


CONFIG = DeploymentConfig("a/b", "a/b")
RUNTIME: Runtime = next(iter(Runtimes(Path("/nowhere")).installed().values()))


def cards_of(driver: Driver, knows: Knows, *, all_of: object = H100) -> LocalCards:
    gpus = [card.gpu for card in (all_of if isinstance(all_of, tuple) else ())]
    cards = LocalCards(Settings(), driver, gpus, ForkServers(), trusted=True)
    cards._evaluator = knows  # type: ignore[assignment]
    return cards


@on_loop
async def test_each_replica_of_small_model_takes_its_own_gpu(machine: Machine) -> None:
    machine.becomes(H100)
    driver = Driver()
    cards = cards_of(driver, Knows(60 << 30))
    whole = (81559 - 454) * MIB - CONTEXT
    async with cards.chosen(CONFIG, RUNTIME) as first:
        assert first == {0: whole}
        async with cards.chosen(CONFIG, RUNTIME) as second:
            assert second == {1: whole}
    # The driver reports the free memory; this test loads nothing.
    async with cards.chosen(CONFIG, RUNTIME) as third:
        assert third == {0: whole}
    await driver.close()


@on_loop
async def test_smallest_fitting_gpu_is_chosen(machine: Machine) -> None:
    machine.becomes(MIXED)
    driver = Driver()
    for size, index in ((1 << 30, 0), (7 << 30, 1)):
        async with cards_of(driver, Knows(size), all_of=MIXED).chosen(CONFIG, RUNTIME) as chosen:
            assert [*(chosen or {})] == [index]
    await driver.close()


@pytest.mark.parametrize("device", ["auto", "cuda:1", "cpu"])
@on_loop
async def test_device_setting_of_user_overrides_choice(device: str, machine: Machine) -> None:
    machine.becomes(H100)
    driver = Driver()
    config = DeploymentConfig("a/b", "a/b", device=device)
    async with cards_of(driver, Knows(1)).chosen(config, RUNTIME) as chosen:
        assert chosen is None
    await driver.close()


@on_loop
async def test_unknown_size_or_gpus_leave_choice_to_process(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.becomes(H100)
    driver = Driver()
    for knows in (Knows(0), Knows(1, cuda=False), Knows(1 << 50)):
        async with cards_of(driver, knows).chosen(CONFIG, RUNTIME) as chosen:
            assert chosen is None
    assert "spread over all GPUs: it has no config" in caplog.text
    machine.becomes((), "mismatch")
    async with cards_of(driver, Knows(1)).chosen(CONFIG, RUNTIME) as chosen:
        assert chosen is None
    for few in (H100[:1], GB10, ()):
        async with cards_of(driver, Knows(1), all_of=few).chosen(CONFIG, RUNTIME) as chosen:
            assert chosen is None
    await driver.close()
