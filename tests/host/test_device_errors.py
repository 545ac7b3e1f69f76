"""CUDA errors that mean a failed GPU, and a replica's report of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ndif.cluster.ray.actors import RayModelActor
from ndif.cluster.remote_actor import MoveAnswer, ReplicaOrder
from ndif.host.device_errors import DeviceFailure, device_failure
from ndif.host.port import ActorError, FailedDeviceError
from ndif.host.runtimes import Runtime
from ndif.runtime.typed_json import from_json, to_json
from ndif.schema.deployment import DeploymentConfig
from ndif.stores.broker.redis.job_channels import JobSender
from ndif.tasks import within
from tests.host.stand_in import FAILS, StandIn, Waiting
from tests.on_loop import on_loop
from tests.runtime.replica import HERE, a_replica, serve
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("lines", "failure"),
    [
        ([ECC], DeviceFailure(ECC)),
        (
            ["loading", f"AcceleratorError: {ECC}", "CUDA kernel errors might be"],
            DeviceFailure(ECC),
        ),
        ([f"torch.AcceleratorError: {ECC}"], DeviceFailure(ECC)),
        (
            ["CUDA error on GPU 3: unspecified launch failure"],
            DeviceFailure("CUDA error on GPU 3: unspecified launch failure", 3),
        ),
        ([ECC, "CUDA error: unknown error"], DeviceFailure("CUDA error: unknown error")),
        (["CUDA error: out of memory"], None),
        (["CUDA error: device-side assert triggered"], None),
        (["CUDA error: invalid device ordinal"], None),
        (["CUDA error: no kernel image is available for execution on the device"], None),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"], None),
        (["they said CUDA error: unknown error"], None),
        ([], None),
    ],
)
def test_gpu_failure_is_distinguished_from_program_error(
    lines: list[str], failure: DeviceFailure | None
) -> None:
    assert device_failure(lines) == failure


# A real model process that prints such an error


SAYS = """#!{python}
import os, sys
print({word!r}, flush=True)
sys.exit(1)
"""


def saying(word: str, folder: Path) -> Runtime:
    """A runtime whose interpreter prints a line and ends."""
    program = folder / "python"
    program.write_text(SAYS.format(python=sys.executable, word=word))
    program.chmod(0o755)
    return replace(HERE, interpreter=program)


@on_loop
async def test_load_failure_caused_by_gpu_reports_device_failure(
    tiny_gpt2: Path, tmp_path: Path
) -> None:
    served = a_replica(tiny_gpt2, saying(f"AcceleratorError: {ECC}", tmp_path))
    with pytest.raises(FailedDeviceError) as caught:
        await served.start()
    assert caught.value.failure == DeviceFailure(ECC)
    assert ECC in str(caught.value)


@on_loop
async def test_other_load_failure_reports_no_device_failure(
    tiny_gpt2: Path, tmp_path: Path
) -> None:
    served = a_replica(tiny_gpt2, saying("CUDA error: out of memory", tmp_path))
    with pytest.raises(ActorError) as caught:
        await served.start()
    assert not isinstance(caught.value, FailedDeviceError)


@on_loop
async def test_replica_lost_to_gpu_failure_reports_it(tiny_gpt2: Path) -> None:
    async with serve(tiny_gpt2) as served:
        assert served.actor.device_failure is None
        served.actor.process._stderr.append(ECC)
        os.kill(served.zygote, signal.SIGKILL)
        await within(served.actor.ended.wait(), PATIENCE_S)
        assert served.actor.device_failure == DeviceFailure(ECC)


@on_loop
async def test_stopped_replica_reports_no_device_failure(tiny_gpt2: Path) -> None:
    async with serve(tiny_gpt2) as served:
        served.actor.process._stderr.append(ECC)
        await served.actor.stop()
        assert served.actor.device_failure is None


# On a node of a cluster


ORDER = to_json(ReplicaOrder(DeploymentConfig("a/b", "/nowhere"), "0.8"))


@on_loop
async def test_node_reports_failed_gpu_to_leader() -> None:
    replica = StandIn(ORDER)
    replica.actor = Waiting(fails=True)
    replica.actor.device_failure = DeviceFailure(ECC, 2)
    answer = from_json(MoveAnswer, await replica.start())
    assert answer == MoveAnswer(error=FAILS, device=DeviceFailure(ECC, 2))
    actor = RayModelActor("name", lambda: None, cast(JobSender, None), {})
    with pytest.raises(FailedDeviceError) as caught:
        await actor._came_up(answer)
    assert caught.value.failure == DeviceFailure(ECC, 2)


@on_loop
async def test_node_reports_gpu_failure_that_ended_replica() -> None:
    replica = StandIn(ORDER)
    await replica.start()
    ended = asyncio.create_task(replica.until_ended())
    await asyncio.sleep(0)
    replica.actor.device_failure = DeviceFailure(ECC)
    replica.actor.die()
    assert await within(ended, PATIENCE_S) == (ECC, None)
