"""A model on a real GPU: properties that need a GPU (tests/runtime has the rest)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from nnsight import TransformersModel

from ndif.config.settings import Settings
from ndif.host.model_actor import ReplicaDevices
from ndif.host.model_process import ModelProcess
from ndif.host.port import ActorError, ReplicaEvictedError, ReplicaLostError
from ndif.host.runner_handle import RunnerHandle
from ndif.host.runtimes import Runtime
from ndif.host.shared_weights import SharedWeights
from ndif.runtime.spec import ModelSpec
from ndif.schema.status import Status
from tests.clients.harness import Client, LocalServer
from tests.conftest import NAME, client_environment
from tests.gpu.conftest import needs_a_gpu
from tests.gpu.devices import GIB
from tests.processes import children
from tests.runtime.replica import (
    HERE,
    PROMPT,
    Sent,
    Served,
    a_replica,
    alive,
    expected,
    lasting,
    reading,
    writing,
)
from tests.tiny_models import make_empty_llama, make_llama
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = [*needs_a_gpu, pytest.mark.process]

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="there are not two CUDA devices"
)


@pytest.fixture(scope="module")
def client(
    server_environment: dict[str, str], tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client of `ndif local start --device cuda:0`."""
    server = LocalServer(NAME, "--device", "cuda:0", environment=server_environment)
    try:
        environment = client_environment(
            server.ready(), tmp_path_factory.mktemp("client-gpu"), Path(__file__).parent
        )
        client = Client("scenarios_gpu", NAME, tiny_gpt2, environment)
        yield client
        client.close()
    finally:
        server.stop()


@pytest.mark.parametrize("scenario", ["reads_and_edits", "generation", "gradients"])
def test_remote_values_match_local_values(client: Client, scenario: str) -> None:
    client.run(f"scenario_{scenario}")


def test_runner_weights_are_on_gpu_and_tied(client: Client) -> None:
    client.run("scenario_the_weights_are_on_the_gpu")


def test_next_runner_works_after_crash(client: Client) -> None:
    for _ in range(3):
        client.run("scenario_a_crash")
        client.run("scenario_reads_and_edits")


@contextlib.asynccontextmanager
async def process(checkpoint: Path, device: str | None) -> AsyncIterator[ModelProcess]:
    runtime = Runtime("0.8", "0.8", Path(sys.executable), ())
    spec = ModelSpec(str(checkpoint), "0.8", task="text-generation", device=device)
    started = ModelProcess(spec, runtime, SharedWeights())
    await started.start(PATIENCE_S, lambda loaded, total: None)
    try:
        yield started
    finally:
        await started.stop()


@contextlib.asynccontextmanager
async def replica(
    checkpoint: Path,
    memory: Mapping[int, int],
    settings: Settings | None = None,
    device: str | None = None,
) -> AsyncIterator[Served]:
    """A replica that may take `memory` bytes of each GPU; `settings` configure a sandboxed server."""
    devices = ReplicaDevices(dict(memory), device=device)
    served = a_replica(checkpoint, HERE, settings, devices=devices)
    await served.start()
    try:
        yield served
    finally:
        await served.actor.stop()


async def ready(runner: RunnerHandle) -> RunnerHandle:
    """Wait until a runner has run its first token and allocated its memory; return it."""
    await asyncio.wait_for(runner.ready(), PATIENCE_S)
    assert runner.alive
    return runner


def free(device: int = 0) -> int:
    return torch.cuda.mem_get_info(device)[0]


async def freed(size: int, device: int = 0) -> None:
    """Wait until `size` bytes are free: a driver frees a process's memory shortly after its end."""
    await eventually(
        lambda: free(device) >= size, lambda: f"{free(device):,} bytes of {size:,} are free"
    )


def near(logits: torch.Tensor, truth: torch.Tensor) -> None:
    """Compare with a tolerance: GPU and CPU round differently."""
    torch.testing.assert_close(logits.cpu(), truth, rtol=1e-3, atol=1e-4)


def test_runners_share_the_weights(tmp_path: Path) -> None:
    size = make_empty_llama(tmp_path / "large")

    async def body() -> None:
        before = free()
        async with process(tmp_path / "large", "cuda:0") as model:
            assert model.model.device == "cuda:0"
            assert model.model.dtype == "bfloat16"
            loaded = free()
            assert before - loaded > size * 0.95
            await ready(await model.fork(fresh=False))
            first = free()
            second_runner = await ready(await model.fork(fresh=False))
            second = free()
            # A runner takes memory for CUDA's own state and its first token, but none for weights.
            print(f"weights {size:,}; runners {loaded - first:,} and {first - second:,} bytes")
            assert loaded - first < size * 0.75
            assert first - second < size * 0.75
            # The memory is freed even if the runner is killed.
            second_runner.kill()
            await second_runner.exit_code(PATIENCE_S)
            await freed(int(first - size * 0.05))

    asyncio.run(body())


def test_ended_runners_free_gpu_memory_and_shared_memory(tiny_gpt2: Path) -> None:
    """Ended runners leave nothing in GPU memory, nor in shared memory, where torch keeps counters."""

    async def body() -> None:
        async with process(tiny_gpt2, None) as model:
            assert model.model.device == "cuda:0"
            (await ready(await model.fork(fresh=False))).kill()
            await time_passes_async(1)
            before, counters = free(), len(os.listdir("/dev/shm"))  # noqa: PTH208
            for _ in range(8):
                runner = await ready(await model.fork(fresh=False))
                runner.kill()
                await runner.exit_code(PATIENCE_S)
            await freed(before - (64 << 20))
            await eventually(lambda: len(os.listdir("/dev/shm")) <= counters)  # noqa: PTH208

    asyncio.run(body())


@pytest.mark.parametrize("trusted", [True, False])
def test_replica_answers_after_each_return_from_cache(
    trusted: bool, tiny_gpt2: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "checkpoint")
    client = TransformersModel(str(tiny_gpt2), task="text-generation")
    read, last, truth = reading(client), lasting(client), expected(tiny_gpt2)
    settings = None if trusted else Settings(session_root=tmp_path / "session", protector="off")

    async def body() -> None:
        free()  # start CUDA in this process before the first measurement
        before = free()
        async with replica(folder, {0: 2 * GIB}, settings) as served:
            near(await served.logits(read, trusted=trusted), truth)
            shutil.rmtree(folder)
            for _ in range(2):
                taken = free()
                owner = served.owner
                await served.actor.to_cache()
                assert children(served.zygote) == []
                assert not alive(owner)
                await freed(before - (64 << 20))
                assert taken < before
                with pytest.raises(ReplicaLostError):
                    await served.run(read, trusted=trusted)
                await served.actor.from_cache({0: 2 * GIB})
                assert served.actor.model.device == "cuda:0"
                near(await served.logits(read, trusted=trusted), truth)
            running = asyncio.create_task(served.run(last, trusted=trusted))
            await asyncio.wait_for(served.begun.wait(), PATIENCE_S)
            await served.actor.to_cache()
            with pytest.raises(ReplicaEvictedError):
                await running
            await freed(before - (64 << 20))

    asyncio.run(body())


def test_weights_are_verified_after_return_from_cache(tiny_gpt2: Path, tmp_path: Path) -> None:
    client = TransformersModel(str(tiny_gpt2), task="text-generation")
    read, write, truth = reading(client), writing(client), expected(tiny_gpt2)
    settings = Settings(session_root=tmp_path, protector="off")

    async def body() -> None:
        async with replica(tiny_gpt2, {0: 2 * GIB}, settings) as served:
            await served.actor.to_cache()
            await served.actor.from_cache({0: 2 * GIB})
            assert not (await served.logits(write, trusted=False)).any()
            near(await served.logits(read, trusted=False), truth)
            # Weights are also verified if the replica is cached before another request.
            assert not (await served.logits(write, trusted=False)).any()
            await served.actor.to_cache()
            await served.actor.from_cache({0: 2 * GIB})
            near(await served.logits(read, trusted=False), truth)

    asyncio.run(body())


def test_large_model_frees_gpu_memory_in_cache_and_takes_it_again(tmp_path: Path) -> None:
    size = make_empty_llama(tmp_path / "large")

    async def body() -> None:
        before = free()
        async with replica(tmp_path / "large", {0: 2 * size}) as served:
            assert before - free() > size * 0.95
            await served.actor.to_cache()
            await freed(before - (64 << 20))
            await served.actor.from_cache({0: 2 * size})
            assert before - free() > size * 0.95
        await freed(before - (64 << 20))

    asyncio.run(body())


def hoarding(client: TransformersModel, size: int) -> bytes:
    """A block that takes `size` bytes of the GPU."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        taken = torch.empty(size, dtype=torch.uint8, device=client.device)
        logits = (client.lm_head.output + taken[0]).save()  # noqa: F841
    return sent.payload


def test_runner_cannot_exceed_gpu_memory_of_replica(tiny_gpt2: Path) -> None:
    client = TransformersModel(str(tiny_gpt2), task="text-generation")
    modest, greedy = hoarding(client, GIB // 2), hoarding(client, 2 * GIB)

    async def body() -> None:
        async with replica(tiny_gpt2, {0: GIB}) as served:
            assert (await served.run(modest)).status is Status.COMPLETED
            refused = await served.run(greedy)
            assert refused.status is Status.ERROR
            assert "out of memory" in refused.description
            # After a return from the cache with more memory, the block fits.
            await served.actor.to_cache()
            await served.actor.from_cache({0: 4 * GIB})
            assert (await served.run(greedy)).status is Status.COMPLETED

    asyncio.run(body())


def test_missing_gpu_is_rejected(tiny_gpt2: Path) -> None:
    count = torch.cuda.device_count()

    async def body() -> None:
        with pytest.raises(ActorError, match=f"on GPU {count}, but torch finds {count} CUDA"):
            async with replica(tiny_gpt2, {count: GIB}):
                pass

    asyncio.run(body())


def test_model_larger_than_its_gpu_memory_is_rejected(tmp_path: Path) -> None:
    size = make_empty_llama(tmp_path / "large")

    async def body() -> None:
        with pytest.raises(ActorError):
            async with replica(tmp_path / "large", {0: size // 4}):
                pass

    asyncio.run(body())


@two_devices
def test_replica_moves_between_gpus_through_cache(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "llama")
    client = TransformersModel(str(folder), task="text-generation")
    read, truth = reading(client), expected(folder)

    async def body() -> None:
        async with replica(folder, {1: GIB}) as served:
            assert served.actor.model.device == "cuda:1"
            near(await served.logits(read), truth)
            # Too little memory for one GPU alone.
            half = weights_of(folder) * 3 // 4
            for memory, first in (({0: GIB}, 0), ({0: half, 1: half}, 0), ({1: GIB}, 1)):
                await served.actor.to_cache()
                await served.actor.from_cache(memory)
                assert served.actor.model.device == f"cuda:{first}"
                near(await served.logits(read), truth)

    asyncio.run(body())


def weights_of(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


@two_devices
def test_model_loads_across_assigned_gpus(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "llama")
    client = TransformersModel(str(folder), task="text-generation")
    half = weights_of(folder) * 3 // 4

    async def body() -> None:
        async with replica(folder, {0: half, 1: half}) as served:
            near(await served.logits(reading(client)), expected(folder))

    asyncio.run(body())


def test_model_loads_on_requested_cpu(tiny_gpt2: Path) -> None:
    async def body() -> None:
        async with process(tiny_gpt2, "cpu") as model:
            assert model.model.device == "cpu"
            await ready(await model.fork(fresh=False))

    asyncio.run(body())


@two_devices
def test_model_stays_on_requested_gpu(tiny_gpt2: Path) -> None:
    async def body() -> None:
        async with process(tiny_gpt2, "cuda:1") as model:
            assert model.model.device == "cuda:1"
            await ready(await model.fork(fresh=False))

    asyncio.run(body())


@two_devices
def test_local_server_serves_model_across_gpus(
    server_environment: dict[str, str], tiny_gpt2: Path, tmp_path: Path
) -> None:
    server = LocalServer(NAME, "--device", "auto", environment=server_environment)
    try:
        environment = client_environment(server.ready(), tmp_path, Path(__file__).parent)
        client = Client("scenarios_gpu", NAME, tiny_gpt2, environment)
        client.run("scenario_reads_and_edits")
        client.run("scenario_generation")
        client.close()
    finally:
        server.stop()


# Untrusted clients come last: if a card cannot be used in the sandbox, all other tests have run by then.


@pytest.fixture(scope="module", params=["on", "off"])
def untrusted(
    request: pytest.FixtureRequest,
    server_environment: dict[str, str],
    tiny_gpt2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Client]]:
    """An untrusted client, with the Protector and without."""
    environment = {**server_environment, "NDIF_PROTECTOR": request.param}
    server = LocalServer(NAME, "--device", "cuda:0", "--sandbox", environment=environment)
    try:
        mine = client_environment(
            server.ready(), tmp_path_factory.mktemp("untrusted-gpu"), Path(__file__).parent
        )
        client = Client("scenarios_gpu", NAME, tiny_gpt2, mine)
        yield request.param, client
        client.close()
    finally:
        server.stop()


def test_sandboxed_requests_are_served_on_gpu(untrusted: tuple[str, Client]) -> None:
    _, client = untrusted
    for scenario in ("reads_and_edits", "generation", "gradients"):
        client.run(f"scenario_{scenario}")


def test_weights_changed_by_untrusted_code_are_restored(untrusted: tuple[str, Client]) -> None:
    protector, client = untrusted
    if protector == "off":
        client.run("scenario_weights_are_overwritten")
    else:
        with pytest.raises(AssertionError, match="not available on this server"):
            client.run("scenario_weights_are_overwritten")
    client.run("scenario_reads_and_edits")
