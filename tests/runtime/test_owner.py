"""An owner, its zygote and their runners, driven by the host's own code as on GPUs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from nnsight import TransformersModel

from ndif.config import Settings
from ndif.host.actor import ModelActor
from ndif.host.port import ActorError, ReplicaLostError
from ndif.host.process import ModelProcessError
from ndif.host.runtimes import Runtime
from ndif.host.weights import Weights
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.status import Status
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import ObjectStore
from tests.on_loop import on_loop
from tests.runtime.replica import (
    alive,
    children,
    dying,
    expected,
    reading,
    serve,
    until,
    writing,
)

PROGRAM = Path(__file__).with_name("owner_on_cpu.py")


@pytest.fixture(scope="module")
def client(tiny_gpt2: Path) -> TransformersModel:
    return TransformersModel(str(tiny_gpt2), task="text-generation")


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """An interpreter whose model processes have an owner."""
    weights = tmp_path / "weights"
    weights.mkdir()
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$3" {weights}\n')
    interpreter.chmod(0o755)
    return Runtime("0.8", "0.8", interpreter, ())


@on_loop
async def test_the_choreography(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel
) -> None:
    read, write, die = reading(client), writing(client), dying(client)
    truth = expected(tiny_gpt2)
    async with serve(tiny_gpt2, runtime) as served:
        # What the host hears is what it hears of a model on CPUs.
        assert (1, 1) in served.progress
        told = served.actor.process.model
        assert (
            told.items()
            >= {
                "class": "GPT2LMHeadModel",
                "parameters": client._module.num_parameters(),
                "dtype": "float32",
                "device": "cpu",
                "task": "text-generation",
                "folder": str(tiny_gpt2),
            }.items()
        )
        assert served.actor.process.load_s > 0
        owner = served.owner
        await until(lambda: len(children(served.zygote)) == 3)  # it, and two runners

        # A runner that never loaded anything computes with the weights.
        assert torch.equal(await served.logits(read), truth)
        assert torch.equal(await served.logits(read), truth)

        # One that crashes costs its own request; the next maps the same weights.
        response = await served.run(die)
        assert response.status is Status.ERROR
        assert "SIGSEGV" in response.description
        for _ in range(3):
            assert torch.equal(await served.logits(read), truth)
            assert (await served.run(die)).status is Status.ERROR
        assert served.owner == owner
        assert alive(owner)
        assert torch.equal(await served.logits(read), truth)

        # The weights are there once: what one runner writes, the others read, later ones too.
        assert not (await served.logits(write)).any()
        assert (await served.run(die)).status is Status.ERROR
        assert not (await served.logits(read)).any()

        family = [served.zygote, *children(served.zygote)]
    await until(lambda: not any(map(alive, family)))


@on_loop
async def test_what_a_stranger_does_to_the_weights_is_undone(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel, tmp_path: Path
) -> None:
    # The files that stand for a GPU's memory are outside of what Landlock would leave a runner.
    settings = Settings(sandbox="off", protector="off", session_root=tmp_path)
    read, write = reading(client), writing(client)
    truth = expected(tiny_gpt2)
    async with serve(tiny_gpt2, runtime, settings) as served:
        assert torch.equal(await served.logits(read, trusted=False), truth)
        for _ in range(2):
            assert not (await served.logits(write, trusted=False)).any()
            assert torch.equal(await served.logits(read, trusted=False), truth)
        # Those who are trusted find what they did themselves, and no stranger does.
        assert not (await served.logits(write, trusted=True)).any()
        assert not (await served.logits(read, trusted=True)).any()
        assert torch.equal(await served.logits(read, trusted=False), truth)


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_warm_and_back(
    trusted: bool, tiny_gpt2: Path, runtime: Runtime, client: TransformersModel, tmp_path: Path
) -> None:
    settings = Settings(sandbox="off", protector="off", session_root=tmp_path)
    folder = shutil.copytree(tiny_gpt2, tmp_path / "checkpoint")
    read, write, truth = reading(client), writing(client), expected(tiny_gpt2)
    async with serve(folder, runtime, None if trusted else settings) as served:
        assert torch.equal(await served.logits(read, trusted=trusted), truth)
        if not trusted:
            # What is left to be undone is undone before the weights are put away.
            assert not (await served.logits(write, trusted=False)).any()
        for name in ("model.safetensors", "config.json"):
            if trusted:  # else there would be nothing to undo it from
                (folder / name).unlink()
        told = served.actor.model
        for _ in range(2 if trusted else 1):
            owner = served.owner
            await served.actor.to_cache()
            # Neither it nor a runner, and so nothing of theirs on any device.
            assert children(served.zygote) == []
            assert not alive(owner)
            with pytest.raises(ReplicaLostError, match="taken off its device"):
                await served.run(read, trusted=trusted)
            await served.actor.from_cache({})
            assert served.owner != owner
            assert served.actor.model == told
            assert torch.equal(await served.logits(read, trusted=trusted), truth)
        if not trusted:
            # And those that came back are watched as the first were.
            assert not (await served.logits(write, trusted=False)).any()
            assert torch.equal(await served.logits(read, trusted=False), truth)
        family = [served.zygote, *children(served.zygote)]
    await until(lambda: not any(map(alive, family)))


@on_loop
async def test_what_cannot_come_back(
    tmp_path: Path, tiny_gpt2: Path, runtime: Runtime, client: TransformersModel
) -> None:
    async with serve(tiny_gpt2, runtime) as served:
        await served.actor.to_cache()
        (tmp_path / "weights" / "fatal").touch()
        with pytest.raises(ActorError, match=r"that loads the weights ended \(-9\)"):
            await served.actor.from_cache({})
        await asyncio.wait_for(served.actor.ended.wait(), 5)


@on_loop
async def test_what_was_on_gpus_comes_back_to_gpus(tiny_gpt2: Path, runtime: Runtime) -> None:
    async with serve(tiny_gpt2, runtime, gpu_mem_bytes_by_id={0: 1 << 30}) as served:
        assert served.actor.process.spec.max_memory == {0: 1 << 30}
        await served.actor.to_cache()
        with pytest.raises(ActorError, match="cannot come to the CPU"):
            await served.actor.from_cache({})


@on_loop
async def test_an_owner_that_is_killed_as_it_puts_the_weights_away(
    tiny_gpt2: Path, runtime: Runtime
) -> None:
    async with serve(tiny_gpt2, runtime) as served:
        os.kill(served.owner, signal.SIGSTOP)
        leaving = asyncio.create_task(served.actor.to_cache())
        await until(lambda: len(children(served.zygote)) == 1)
        os.kill(served.owner, signal.SIGKILL)
        await leaving
        await asyncio.wait_for(served.actor.ended.wait(), 5)


@on_loop
async def test_without_its_owner_a_replica_is_lost(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel
) -> None:
    read = reading(client)
    async with serve(tiny_gpt2, runtime) as served:
        family = [served.zygote, *children(served.zygote)]
        os.kill(served.owner, signal.SIGKILL)
        await asyncio.wait_for(served.actor.process.ended.wait(), 5)
        with pytest.raises(ReplicaLostError, match=r"process that held the weights ended \(-9\)"):
            await served.run(read)
        await until(lambda: not any(map(alive, family)))


@on_loop
async def test_an_owner_ends_with_its_zygote(tiny_gpt2: Path, runtime: Runtime) -> None:
    async with serve(tiny_gpt2, runtime) as served:
        family = children(served.zygote)
        os.kill(served.zygote, signal.SIGKILL)
        await until(lambda: not any(map(alive, family)))


@on_loop
async def test_what_an_owner_cannot_load_the_host_is_told(
    tmp_path: Path, tiny_gpt2: Path, runtime: Runtime
) -> None:
    with pytest.raises(ModelProcessError, match="nothing-is-here"):
        async with serve(tmp_path / "nothing-is-here", runtime):
            pass


@on_loop
async def test_an_owner_that_is_killed_while_it_loads(
    tmp_path: Path, tiny_gpt2: Path, runtime: Runtime
) -> None:
    (tmp_path / "weights" / "fatal").touch()
    with pytest.raises(ModelProcessError, match=r"that loads the weights ended \(-9\)"):
        async with serve(tiny_gpt2, runtime):
            pass


@on_loop
async def test_cuda_where_there_is_none(tiny_gpt2: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    runtime = Runtime("0.8", "0.8", Path(sys.executable), ())
    config = DeploymentConfig("test/model", str(tiny_gpt2), device="cuda:0")
    actor = ModelActor(
        config,
        runtime,
        Settings(),
        MemoryBroker(),
        cast(ObjectStore, None),
        Weights(),
        untrusted=False,
    )
    with pytest.raises(ModelProcessError, match=r"^ValueError: The model is to be on cuda:0, but"):
        await actor.start(lambda done, total: None)
