"""A model on a real GPU: what a machine without one cannot show (see tests/runtime for the rest)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ndif.host.process import ModelProcess
from ndif.host.runner import Runner
from ndif.host.runtimes import Runtime
from ndif.host.weights import Weights
from ndif.runtime.spec import ModelSpec
from tests.clients.harness import Client, LocalServer
from tests.conftest import NAME, client_environment
from tests.tiny_models import make_gpt2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")

PATIENCE_S = 120


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


@pytest.fixture(scope="module", params=["on", "off"])
def stranger(
    request: pytest.FixtureRequest,
    server_environment: dict[str, str],
    tiny_gpt2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Client]]:
    """A client that the server does not trust, with the Protector and without."""
    environment = {**server_environment, "NDIF_PROTECTOR": request.param}
    server = LocalServer(NAME, "--device", "cuda:0", "--sandbox", environment=environment)
    try:
        mine = client_environment(
            server.ready(), tmp_path_factory.mktemp("stranger-gpu"), Path(__file__).parent
        )
        client = Client("scenarios_gpu", NAME, tiny_gpt2, mine)
        yield request.param, client
        client.close()
    finally:
        server.stop()


def test_a_stranger_is_confined_and_served(stranger: tuple[str, Client]) -> None:
    _, client = stranger
    for scenario in ("reads_and_edits", "generation", "gradients"):
        client.run(f"scenario_{scenario}")


def test_what_a_stranger_does_to_the_weights_is_undone(stranger: tuple[str, Client]) -> None:
    protector, client = stranger
    if protector == "off":
        client.run("scenario_weights_are_overwritten")
    else:
        with pytest.raises(AssertionError, match="not available on this server"):
            client.run("scenario_weights_are_overwritten")
    client.run("scenario_reads_and_edits")


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
    started = ModelProcess(spec, runtime, Weights())
    await started.start(PATIENCE_S, lambda done, total: None)
    try:
        yield started
    finally:
        await started.stop()


async def ready(runner: Runner) -> Runner:
    """A runner that has run its first token, and so has all that it takes."""
    await asyncio.wait_for(runner.ready(), PATIENCE_S)
    assert runner.alive
    return runner


def make_large(folder: Path) -> int:
    """Write a Llama of 2 GB, all zeros; its weights' bytes."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=5,
        num_attention_heads=32,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    model.save_pretrained(folder)
    # A pipeline wants a tokenizer; it is not asked for a token.
    make_gpt2(folder.with_name("small"))
    for file in folder.with_name("small").glob("token*"):
        file.rename(folder / file.name)
    return sum(parameter.nbytes for parameter in model.parameters())


def free() -> int:
    return torch.cuda.mem_get_info(0)[0]


def test_runners_share_the_weights(tmp_path: Path) -> None:
    size = make_large(tmp_path / "large")

    async def body() -> None:
        before = free()
        async with process(tmp_path / "large", "cuda:0") as model:
            assert model.model["device"] == "cuda:0"
            assert model.model["dtype"] == "bfloat16"
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
            deadline = time.monotonic() + 10
            while free() < first - size * 0.05:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)

    asyncio.run(body())


def test_many_runners_one_after_the_other(tiny_gpt2: Path) -> None:
    """Neither the GPU nor the shared memory of torch's counters fills with what ended runners had."""

    async def body() -> None:
        async with process(tiny_gpt2, None) as model:
            assert model.model["device"] == "cuda:0"
            (await ready(await model.fork(fresh=False))).kill()
            await asyncio.sleep(1)
            before, counters = free(), len(os.listdir("/dev/shm"))  # noqa: PTH208
            for _ in range(8):
                runner = await ready(await model.fork(fresh=False))
                runner.kill()
                await runner.exit_code(PATIENCE_S)
            await asyncio.sleep(1)
            assert free() > before - (64 << 20)
            assert len(os.listdir("/dev/shm")) <= counters  # noqa: PTH208

    asyncio.run(body())


def test_a_model_that_is_to_be_on_the_cpu_is_there(tiny_gpt2: Path) -> None:
    async def body() -> None:
        async with process(tiny_gpt2, "cpu") as model:
            assert model.model["device"] == "cpu"
            await ready(await model.fork(fresh=False))

    asyncio.run(body())


@two_devices
def test_a_model_stays_on_the_gpu_it_is_to_be_on(tiny_gpt2: Path) -> None:
    async def body() -> None:
        async with process(tiny_gpt2, "cuda:1") as model:
            assert model.model["device"] == "cuda:1"
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
