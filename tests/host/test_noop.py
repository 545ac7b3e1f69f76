"""The no-op model process behaves like a real one for its host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zstandard
from bench.noop import noop_runtime

from ndif.config.settings import Settings
from ndif.host.evaluation import Evaluator
from ndif.host.port import ReplicaLostError
from ndif.schema import wires
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.response import InlineResult
from ndif.schema.status import Status
from tests.on_loop import on_loop
from tests.runtime.replica import Served, a_replica, alive, serve
from tests.waiting import time_passes_async

pytestmark = pytest.mark.process


async def answered(served: Served, trusted: bool) -> None:
    response = await served.run(b"anything", trusted=trusted)
    assert response.status is Status.COMPLETED, response.description
    assert isinstance(response.data, InlineResult)
    assert response.data.content == wires.torch_bytes({})


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_noop_replica_answers_and_returns_from_cache(trusted: bool, tmp_path: Path) -> None:
    settings = None if trusted else Settings(session_root=tmp_path)
    async with serve(tmp_path, noop_runtime(tmp_path), settings) as served:
        for _ in range(20):
            await answered(served, trusted)
        await served.actor.to_cache()
        with pytest.raises(ReplicaLostError):
            await answered(served, trusted)
        await served.actor.from_cache({})
        await answered(served, trusted)
        assert served.actor.model.class_name == "Nothing"
        zygote = served.zygote
    assert not alive(zygote)


@on_loop
async def test_noop_process_is_not_taken_for_frozen(tmp_path: Path) -> None:
    served = a_replica(tmp_path, noop_runtime(tmp_path))
    served.actor.process.frozen_s = 1.0
    await served.start()
    try:
        zygote = served.zygote
        await time_passes_async(1.5)
        await answered(served, trusted=True)
        assert served.zygote == zygote
    finally:
        await served.actor.stop()


@on_loop
async def test_noop_replica_serves_repository_to_untrusted_request(tmp_path: Path) -> None:
    """The server is sandboxed, so that it fetches the repository first."""
    runtime = noop_runtime(tmp_path)
    async with serve(Path("test-org/nothing"), runtime, Settings(session_root=tmp_path)) as served:
        await answered(served, trusted=False)


@on_loop
async def test_noop_runtime_reports_configured_size(tmp_path: Path) -> None:
    evaluate = Evaluator()
    config = DeploymentConfig("test/model", "test-org/nothing", padding_factor=0)
    evaluation = await evaluate(config, noop_runtime(tmp_path, size_bytes=1234))
    assert (evaluation.size_bytes, evaluation.task) == (1234, "text-generation")
    await evaluate.stop()


def test_noop_compressed_result_equals_plain_result() -> None:
    from bench.noop import process

    assert zstandard.ZstdDecompressor().decompress(process.COMPRESSED) == process.RESULT


@on_loop
async def test_noop_replicas_run_concurrently(tmp_path: Path) -> None:
    runtime = noop_runtime(tmp_path)

    async def run_one() -> None:
        async with serve(tmp_path, runtime) as served:
            for _ in range(10):
                await answered(served, trusted=True)

    await asyncio.gather(*(run_one() for _ in range(5)))
