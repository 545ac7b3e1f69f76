"""The watch on GPU memory: real processes, and a pretend driver that reports their memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from nnsight import TransformersModel

from ndif.host import watchdogs
from ndif.host.gpus import Driver
from ndif.host.model_actor import ReplicaDevices
from ndif.host.watchdogs import SLACK, GpuUsage, GpuWatch, exceeded, usage_of
from ndif.schema.status import Status
from ndif.sizes import format_size
from ndif.tasks import within
from tests.host.machines import H100, MIB, Machine
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.replica import (
    lasting,
    serve,
)
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = pytest.mark.process

SHARE = 10 << 30
EVERY_S = 0.05
GPUS = [card.gpu for card in H100[:2]]
SIZES = [80 << 30, 80 << 30]

ZYGOTE = """
import os, sys, time
children = [os.fork() or time.sleep(600) for _ in range(3)]
print(*children, flush=True)
time.sleep(600)
"""


@dataclass
class Replica:
    """A process and its children: an owner, and two runners."""

    zygote: int
    owner: int
    runner: int
    other: int


@pytest.fixture
def replica() -> Iterator[Replica]:
    process = subprocess.Popen(
        [sys.executable, "-Sc", ZYGOTE], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    yield Replica(process.pid, *map(int, process.stdout.readline().split()))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def use(machine: Machine, gpu: int, **mib: int) -> None:
    """Report GPU memory of processes in MiB; `p123` is the process 123."""
    uuid = GPUS[gpu].uuid
    lines = (f"process {uuid} {name[1:]} {size * MIB}" for name, size in mib.items())
    # Replace the file atomically.
    new = Machine(machine.file.with_suffix(".new"))
    new.becomes(H100[:2], *lines)
    new.file.replace(machine.file)


def holding(
    replica: Replica, *, owner: int = 8000, runner: int = 500, other: int = 500
) -> dict[str, int]:
    return {f"p{replica.owner}": owner, f"p{replica.runner}": runner, f"p{replica.other}": other}


# Limits


def test_gpu_use_within_share_is_allowed() -> None:
    before = GpuUsage(500 * MIB, 9000 * MIB)
    assert exceeded(SHARE, before, GpuUsage(1600 * MIB, 10100 * MIB)) is None
    assert exceeded(SHARE, before, GpuUsage(1740 * MIB, SHARE)) is None


def test_gpu_limit_message_states_memory_of_request() -> None:
    reason = exceeded(SHARE, GpuUsage(500 * MIB, 9000 * MIB), GpuUsage(4500 * MIB, 13000 * MIB))
    assert reason is not None
    assert "took 3.9GiB of GPU memory" in reason
    assert f"the {format_size(SHARE)} that it has of a GPU" in reason


def test_memory_over_share_before_request_does_not_count() -> None:
    before = GpuUsage(500 * MIB, SHARE + 900 * MIB)
    assert exceeded(SHARE, before, before) is None
    grown = GpuUsage(before.runner_bytes + SLACK, before.replica_bytes + SLACK)
    assert exceeded(SHARE, before, grown) is None
    grown = GpuUsage(before.runner_bytes + SLACK + 1, before.replica_bytes + SLACK + 1)
    assert exceeded(SHARE, before, grown) is not None


def test_memory_of_other_replica_processes_does_not_count() -> None:
    assert exceeded(SHARE, GpuUsage(0, SHARE), GpuUsage(SLACK, SHARE + 5 * SLACK)) is None


def test_replica_usage_sums_children_of_zygote(replica: Replica) -> None:
    used = {replica.owner: 5, replica.runner: 2, replica.other: None, os.getpid(): 100}
    assert usage_of(used, replica.runner, replica.zygote) == GpuUsage(2, 7)
    assert usage_of(used, replica.other, replica.zygote) == GpuUsage(0, 7)
    assert usage_of({os.getpid(): 100, 999_999_999: 3}, replica.runner, replica.zygote) is None
    assert usage_of({replica.owner: None}, replica.runner, replica.zygote) is None


# Over time


async def watched(
    machine: Machine, replica: Replica, shares: dict[int, int], driver: Driver
) -> tuple[asyncio.Task[None], list[str], GpuWatch]:
    watch = GpuWatch(driver, GPUS, SIZES, EVERY_S)
    reasons: list[str] = []
    over = watch.enforce(replica.runner, replica.zygote, shares, {}, reasons.append)
    return asyncio.create_task(over), reasons, watch


@on_loop
async def test_request_over_gpu_share_is_ended(machine: Machine, replica: Replica) -> None:
    use(machine, 1, **holding(replica))
    driver = Driver()
    watching, reasons, watch = await watched(machine, replica, {1: SHARE}, driver)
    await eventually(lambda: watch._sample[0] > 0)
    await time_passes_async(4 * EVERY_S)
    assert not reasons
    assert not watching.done()
    use(machine, 1, **holding(replica, runner=4500))
    await within(watching, PATIENCE_S)
    assert ["took 3.9GiB" in reason for reason in reasons] == [True]
    await driver.close()


@on_loop
async def test_memory_taken_before_first_sample_counts(machine: Machine, replica: Replica) -> None:
    use(machine, 1, **holding(replica))
    driver = Driver()
    watch = GpuWatch(driver, GPUS, SIZES, EVERY_S)
    arguments = replica.runner, replica.zygote, {0: 80 << 30, 1: SHARE}
    before = await watch.before(*arguments)
    assert before == {1: GpuUsage(500 * MIB, 9000 * MIB)}
    use(machine, 1, **holding(replica, runner=4500))
    reasons: list[str] = []
    await within(watch.enforce(*arguments, before, reasons.append), PATIENCE_S)
    assert ["took 3.9GiB" in reason for reason in reasons] == [True]
    await driver.close()


@on_loop
async def test_request_does_not_wait_for_hanging_driver(
    machine: Machine, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.becomes((), "hang")
    monkeypatch.setattr(watchdogs, "_FIRST_S", 0.1)
    driver = Driver(timeout_s=PATIENCE_S)
    watch = GpuWatch(driver, GPUS, SIZES, EVERY_S)
    assert await watch.before(replica.runner, replica.zygote, {1: SHARE}) == {}
    await driver.close()


@on_loop
async def test_exclusive_gpu_is_not_watched(machine: Machine, replica: Replica) -> None:
    machine.becomes((), "hang")
    driver = Driver()
    watching, reasons, _ = await watched(machine, replica, {0: 80 << 30}, driver)
    await within(watching, PATIENCE_S)
    assert not reasons
    await driver.close()


@pytest.mark.parametrize("kind", ["other ids", "no driver"])
@on_loop
async def test_driver_without_process_memory_is_logged_once(
    kind: str, machine: Machine, replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "no driver":
        machine.becomes((), "mismatch")
    else:
        use(machine, 1, p999999999=5000)
    driver = Driver()
    watching, reasons, watch = await watched(machine, replica, {1: SHARE}, driver)
    await within(watching, PATIENCE_S)
    await watch.enforce(replica.runner, replica.zygote, {1: SHARE}, {}, reasons.append)
    assert not reasons
    assert caplog.text.count("is not watched") == 1
    await driver.close()


@on_loop
async def test_job_ended_on_shared_gpu_gets_reason(machine: Machine, tiny_gpt2: Path) -> None:
    client = TransformersModel(str(tiny_gpt2), task="text-generation")
    driver = Driver()
    watch = GpuWatch(driver, GPUS, SIZES, EVERY_S)
    devices = ReplicaDevices({0: SHARE}, device="cpu")
    async with serve(tiny_gpt2, gpu_watch=watch, devices=devices) as served:
        served.actor.process.exposes_weights = True  # as on a GPU
        # Without a GPU there is no owner: the spare runner stands in for it.
        await eventually(lambda: len(children(served.zygote)) == 2)
        owner = max(children(served.zygote))
        use(machine, 0, **{f"p{owner}": 8000})
        running = asyncio.create_task(served.run(lasting(client)))
        await within(served.begun.wait(), PATIENCE_S)
        assert watch._sample[0] > 0  # a sample from before the job began
        runner = served.actor.state.runner_pid
        assert runner is not None
        use(machine, 0, **{f"p{owner}": 8000, f"p{runner}": 4000})
        response = await within(running, PATIENCE_S)
        assert response.status is Status.ERROR
        assert "of GPU memory, and with it the model holds more than" in response.description
    await driver.close()
