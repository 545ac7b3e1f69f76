"""A model on a real GPU: the properties that only a GPU can show (tests/runtime has the rest)."""

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
def test_a_trace_is_as_the_local_one(client: Client, scenario: str) -> None:
    client.run(f"scenario_{scenario}")


def test_a_runner_has_the_weights_on_the_gpu_and_tied(client: Client) -> None:
    client.run("scenario_the_weights_are_on_the_gpu")


def test_after_a_crash_the_next_runner_works(client: Client) -> None:
    for _ in range(3):
        client.run("scenario_a_crash")
        client.run("scenario_reads_and_edits")


@contextlib.asynccontextmanager
async def process(checkpoint: Path, device: str | None) -> AsyncIterator[ModelProcess]:
    runtime = Runtime("0.8", "0.8", Path(sys.executable), ())
    spec = ModelSpec(str(checkpoint), "0.8", task="text-generation", device=device)
    started = ModelProcess(spec, runtime, SharedWeights())
    await started.start(PATIENCE_S, lambda done, total: None)
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
    """A replica that may take `memory` of the GPUs; `settings` for a server of untrusted users."""
    devices = ReplicaDevices(dict(memory), device=device)
    served = a_replica(checkpoint, HERE, settings, devices=devices)
    await served.start()
    try:
        yield served
    finally:
        await served.actor.stop()


async def ready(runner: RunnerHandle) -> RunnerHandle:
    """A runner that has run its first token, and has allocated all that it needs."""
    await asyncio.wait_for(runner.ready(), PATIENCE_S)
    assert runner.alive
    return runner


def free(device: int = 0) -> int:
    return torch.cuda.mem_get_info(device)[0]


async def freed(size: int, device: int = 0) -> None:
    """Return once so much is free: a driver gives back what a process had a little after its end."""
    await eventually(
        lambda: free(device) >= size, lambda: f"{free(device):,} bytes of {size:,} are free"
    )


def near(logits: torch.Tensor, truth: torch.Tensor) -> None:
    """A GPU does not round as a CPU does."""
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
            # What a runner takes, CUDA's own state and its first token, is not what weights take.
            print(f"weights {size:,}; runners {loaded - first:,} and {first - second:,} bytes")
            assert loaded - first < size * 0.75
            assert first - second < size * 0.75
            # And it is given back, however a runner ends.
            second_runner.kill()
            await second_runner.exit_code(PATIENCE_S)
            await freed(int(first - size * 0.05))

    asyncio.run(body())


def test_many_runners_one_after_the_other(tiny_gpt2: Path) -> None:
    """Neither the GPU nor the shared memory of torch's counters fills with what ended runners had."""

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
def test_warm_and_back(trusted: bool, tiny_gpt2: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "checkpoint")
    client = TransformersModel(str(tiny_gpt2), task="text-generation")
    read, last, truth = reading(client), lasting(client), expected(tiny_gpt2)
    settings = None if trusted else Settings(session_root=tmp_path / "session", protector="off")

    async def body() -> None:
        free()  # CUDA of this process is there before anything is measured
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


def test_weights_that_returned_are_verified(tiny_gpt2: Path, tmp_path: Path) -> None:
    client = TransformersModel(str(tiny_gpt2), task="text-generation")
    read, write, truth = reading(client), writing(client), expected(tiny_gpt2)
    settings = Settings(session_root=tmp_path, protector="off")

    async def body() -> None:
        async with replica(tiny_gpt2, {0: 2 * GIB}, settings) as served:
            await served.actor.to_cache()
            await served.actor.from_cache({0: 2 * GIB})
            assert not (await served.logits(write, trusted=False)).any()
            near(await served.logits(read, trusted=False), truth)
            # Also where they are put away before anybody asked for them again.
            assert not (await served.logits(write, trusted=False)).any()
            await served.actor.to_cache()
            await served.actor.from_cache({0: 2 * GIB})
            near(await served.logits(read, trusted=False), truth)

    asyncio.run(body())


def test_a_large_model_gives_its_memory_back_and_takes_it_again(tmp_path: Path) -> None:
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


def test_a_runner_takes_no_more_of_a_gpu_than_the_model_was_given(tiny_gpt2: Path) -> None:
    client = TransformersModel(str(tiny_gpt2), task="text-generation")
    modest, greedy = hoarding(client, GIB // 2), hoarding(client, 2 * GIB)

    async def body() -> None:
        async with replica(tiny_gpt2, {0: GIB}) as served:
            assert (await served.run(modest)).status is Status.COMPLETED
            refused = await served.run(greedy)
            assert refused.status is Status.ERROR
            assert "out of memory" in refused.description
            # The same after a pause, with more.
            await served.actor.to_cache()
            await served.actor.from_cache({0: 4 * GIB})
            assert (await served.run(greedy)).status is Status.COMPLETED

    asyncio.run(body())


def test_a_gpu_that_does_not_exist_is_refused(tiny_gpt2: Path) -> None:
    count = torch.cuda.device_count()

    async def body() -> None:
        with pytest.raises(ActorError, match=f"on GPU {count}, but torch finds {count} CUDA"):
            async with replica(tiny_gpt2, {count: GIB}):
                pass

    asyncio.run(body())


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    size = make_empty_llama(tmp_path / "large")

    async def body() -> None:
        with pytest.raises(ActorError):
            async with replica(tmp_path / "large", {0: size // 4}):
                pass

    asyncio.run(body())


@two_devices
def test_one_gpu_then_the_other_then_both(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "llama")
    client = TransformersModel(str(folder), task="text-generation")
    read, truth = reading(client), expected(folder)

    async def body() -> None:
        async with replica(folder, {1: GIB}) as served:
            assert served.actor.model.device == "cuda:1"
            near(await served.logits(read), truth)
            # As little as makes it need both.
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
def test_a_model_that_is_loaded_over_the_gpus_it_was_given(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "llama")
    client = TransformersModel(str(folder), task="text-generation")
    half = weights_of(folder) * 3 // 4

    async def body() -> None:
        async with replica(folder, {0: half, 1: half}) as served:
            near(await served.logits(reading(client)), expected(folder))

    asyncio.run(body())


def test_a_model_that_is_to_be_on_the_cpu_is_there(tiny_gpt2: Path) -> None:
    async def body() -> None:
        async with process(tiny_gpt2, "cpu") as model:
            assert model.model.device == "cpu"
            await ready(await model.fork(fresh=False))

    asyncio.run(body())


@two_devices
def test_a_model_stays_on_the_gpu_it_is_to_be_on(tiny_gpt2: Path) -> None:
    async def body() -> None:
        async with process(tiny_gpt2, "cuda:1") as model:
            assert model.model.device == "cuda:1"
            await ready(await model.fork(fresh=False))

    asyncio.run(body())


@two_devices
def test_a_model_over_several_gpus(
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


# Those whom nobody trusts come last: a card that refuses to confine them has served all others by then.


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


def test_untrusted_code_is_confined_and_served(untrusted: tuple[str, Client]) -> None:
    _, client = untrusted
    for scenario in ("reads_and_edits", "generation", "gradients"):
        client.run(f"scenario_{scenario}")


def test_weights_that_untrusted_code_changes_are_restored(untrusted: tuple[str, Client]) -> None:
    protector, client = untrusted
    if protector == "off":
        client.run("scenario_weights_are_overwritten")
    else:
        with pytest.raises(AssertionError, match="not available on this server"):
            client.run("scenario_weights_are_overwritten")
    client.run("scenario_reads_and_edits")
