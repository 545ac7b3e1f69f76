"""A weight owner, its zygote and their runners, driven by the host's code as on GPUs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import cast

import pytest
import torch
from nnsight import TransformersModel

from ndif.config.settings import Settings
from ndif.host.model_actor import HostResources, LocalModelActor, ReplicaDevices
from ndif.host.model_process import ModelProcessError
from ndif.host.port import ActorError, ReplicaLostError
from ndif.host.runner_handle import RunnerHandle
from ndif.host.runtimes import Runtime
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.status import Status
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import ObjectStore
from ndif.tasks import within
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.process.pretend_driver import ANOTHERS_CARD, CARD
from tests.runtime.replica import (
    PROMPT,
    Sent,
    alive,
    dying,
    expected,
    pretending,
    reading,
    serve,
    writing,
)
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(tiny_gpt2: Path) -> TransformersModel:
    return TransformersModel(str(tiny_gpt2), task="text-generation")


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """An interpreter whose model processes have an owner."""
    return pretending(tmp_path)


@on_loop
async def test_owner_runners_and_zygote_start_and_end(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel
) -> None:
    read, write, die = reading(client), writing(client), dying(client)
    truth = expected(tiny_gpt2)
    async with serve(tiny_gpt2, runtime) as served:
        # The host receives the same reports as for a model on CPUs.
        assert (1, 1) in served.progress
        loaded = served.actor.process.model
        assert loaded is not None
        assert loaded.class_name == "GPT2LMHeadModel"
        assert loaded.parameters == client._module.num_parameters()
        assert (loaded.dtype, loaded.device) == ("float32", "cpu")
        assert (loaded.task, loaded.folder) == ("text-generation", str(tiny_gpt2))
        assert served.actor.process.load_s > 0
        owner = served.owner
        await eventually(lambda: len(children(served.zygote)) == 3)  # the owner and two runners

        # A runner that never loaded anything computes with the weights.
        assert torch.equal(await served.logits(read), truth)
        assert torch.equal(await served.logits(read), truth)

        # A crash of a runner fails its own request; the next runner maps the same weights.
        response = await served.run(die)
        assert response.status is Status.ERROR
        assert "SIGSEGV" in response.description
        for _ in range(3):
            assert torch.equal(await served.logits(read), truth)
            assert (await served.run(die)).status is Status.ERROR
        assert served.owner == owner
        assert alive(owner)
        assert torch.equal(await served.logits(read), truth)

        # The weights exist once: a runner's writes are undone before another runner reads.
        assert not (await served.logits(write)).any()
        assert torch.equal(await served.logits(read), truth)
        assert not (await served.logits(write)).any()
        assert (await served.run(die)).status is Status.ERROR
        assert torch.equal(await served.logits(read), truth)

        family = [served.zygote, *children(served.zygote)]
    await eventually(lambda: not any(map(alive, family)))


def strangers(folder: Path) -> Settings:
    """Return settings of a server whose users are untrusted and may run any Python code."""
    return Settings(sandbox="require", protector="off", session_root=folder)


@on_loop
async def test_weights_that_a_request_changes_are_restored(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel, tmp_path: Path
) -> None:
    read, write = reading(client), writing(client)
    truth = expected(tiny_gpt2)
    async with serve(tiny_gpt2, runtime, strangers(tmp_path)) as served:
        assert torch.equal(await served.logits(read, trusted=False), truth)
        for writes in (False, True):
            for reads in (False, True):
                assert not (await served.logits(write, trusted=writes)).any()
                assert torch.equal(await served.logits(read, trusted=reads), truth)


def telling(client: TransformersModel) -> bytes:
    """Return a block that reports its process id."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        logits = torch.tensor(os.getpid()).save()  # noqa: F841
    return sent.payload


@on_loop
async def test_key_reuses_runner_with_verified_weights(
    tiny_gpt2: Path,
    runtime: Runtime,
    client: TransformersModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is the default on GPUs."""
    monkeypatch.setattr("ndif.host.runner_pool._STOPPED_AFTER_S", 60.0)  # not by time
    read, write, tell = reading(client), writing(client), telling(client)
    truth = expected(tiny_gpt2)
    async with serve(tiny_gpt2, runtime, strangers(tmp_path)) as served:
        did: list[str] = []
        verify, pause = served.actor.process.verify, RunnerHandle.pause

        async def noted() -> int:
            did.append("verified")
            return await verify()

        def paused(runner: RunnerHandle) -> None:
            did.append("stopped")
            pause(runner)

        monkeypatch.setattr(served.actor.process, "verify", noted)
        monkeypatch.setattr(RunnerHandle, "pause", paused)

        async def pid(key: str) -> float:
            return (await served.logits(tell, trusted=False, key=key)).item()

        first = await pid("one")
        assert not (await served.logits(write, trusted=False, key="one")).any()
        assert torch.equal(await served.logits(read, trusted=False, key="one"), truth)
        assert await pid("one") == first
        # While the owner verifies the weights, the waiting process is stopped and cannot write to them.
        assert did[:6] == ["stopped", "verified"] * 3
        # A process that has ended may have written to the weights since.
        assert await pid("another") not in (first, 0)
        assert did.count("verified") == 5
        # Keyless requests do not share a process, so one verification each is enough.
        assert await pid("") != await pid("")
        assert did.count("verified") == 8
        assert torch.equal(await served.logits(read, trusted=False), truth)


def opening(client: TransformersModel, path: Path) -> bytes:
    """Return a block that opens a device."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        os.close(os.open(path, os.O_RDWR))
        logits = client.lm_head.output.save()  # noqa: F841
    return sent.payload


@on_loop
async def test_untrusted_code_opens_only_the_replicas_devices(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel, tmp_path: Path
) -> None:
    truth = expected(tiny_gpt2)
    own, anothers = opening(client, CARD), opening(client, ANOTHERS_CARD)
    async with serve(tiny_gpt2, runtime, strangers(tmp_path)) as served:
        assert torch.equal(await served.logits(own, trusted=False), truth)
        response = await served.run(anothers, trusted=False)
        assert "PermissionError" in response.description
        # Trusted requests are not confined.
        assert torch.equal(await served.logits(anothers), truth)


def looking(client: TransformersModel) -> bytes:
    """Return a block that counts variables and files that only the driver's start needed."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        found = [name for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_X") if os.environ.get(name)]
        for name in ("/proc/self/task", "/proc/self/maps", "/proc/modules"):
            if os.access(name, os.R_OK):
                try:
                    os.close(os.open(name, os.O_RDONLY))
                    found.append(name)
                except PermissionError:
                    pass
        logits = torch.tensor(len(found)).save()  # noqa: F841
    return sent.payload


@on_loop
async def test_block_cannot_open_files_that_driver_needed_to_start(
    tiny_gpt2: Path,
    runtime: Runtime,
    client: TransformersModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-the-replica")
    monkeypatch.setenv("NVIDIA_X", "1")
    look = looking(client)
    async with serve(tiny_gpt2, runtime, strangers(tmp_path)) as served:
        assert (await served.logits(look, trusted=False)).item() == 0
        assert (await served.logits(look)).item() > 3


def touching(client: TransformersModel, file: Path) -> bytes:
    """Return a block that leaves a file behind and fails."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        open(file, "w").close()  # noqa: PTH123 - as a block does
        raise ValueError("of the block's own")
    return sent.payload


@on_loop
async def test_runner_is_replaced_after_device_side_assert(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel, tmp_path: Path
) -> None:
    read, truth = reading(client), expected(tiny_gpt2)
    asserted = tmp_path / "weights" / "asserted"
    async with serve(tiny_gpt2, runtime) as served:
        before = set(children(served.zygote))
        response = await served.run(touching(client, asserted))
        assert response.status is Status.ERROR
        # The block's error comes first, then the reason for the replaced process.
        assert "of the block's own" in response.description
        assert "CUDA error on GPU 0: device-side assert triggered" in response.description
        asserted.unlink()
        assert torch.equal(await served.logits(read), truth)
        await eventually(lambda: len(before - set(children(served.zygote))) == 1)


@on_loop
async def test_hung_device_ends_replica(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel, tmp_path: Path
) -> None:
    read = reading(client)
    async with serve(tiny_gpt2, runtime, strangers(tmp_path)) as served:
        family = [served.zygote, *children(served.zygote)]
        assert (await served.run(read, trusted=False)).status is Status.COMPLETED
        await eventually(lambda: not served.actor.state.is_verifying)
        (tmp_path / "weights" / "busy").touch()
        assert (await served.run(read, trusted=False)).status is Status.COMPLETED
        with pytest.raises(ReplicaLostError, match="on GPU 0: it did nothing"):
            await served.run(read, trusted=False)
        await within(served.actor.ended.wait(), PATIENCE_S)
        await eventually(lambda: not any(map(alive, family)))


def lingering(client: TransformersModel) -> bytes:
    """Return a block whose process does not end by itself."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        os._exit = lambda _: time.sleep(3600)  # type: ignore[assignment]
        logits = client.lm_head.output.save()  # noqa: F841
    return sent.payload


@on_loop
async def test_weights_are_verified_only_after_the_runner_ended(
    tiny_gpt2: Path,
    runtime: Runtime,
    client: TransformersModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel may take time to end a process."""
    kill, killed = RunnerHandle.kill, []

    def later(runner: RunnerHandle) -> None:
        killed.append(runner)

    monkeypatch.setattr(RunnerHandle, "kill", later)
    async with serve(tiny_gpt2, runtime, strangers(tmp_path)) as served:
        assert (await served.run(lingering(client), trusted=False)).status is Status.COMPLETED
        lingers, alive_then = killed[-1], []
        verify = served.actor.process.verify

        async def count_check() -> int:
            alive_then.append(lingers.alive)
            return await verify()

        monkeypatch.setattr(served.actor.process, "verify", count_check)
        running = asyncio.create_task(served.run(reading(client), trusted=False))
        await time_passes_async(0.3)
        assert lingers.alive
        assert alive_then == []
        monkeypatch.setattr(RunnerHandle, "kill", kill)
        for runner in killed:
            runner.kill()
        assert (await running).status is Status.COMPLETED
        assert alive_then[0] is False


@on_loop
async def test_replica_is_lost_if_runner_cannot_be_ended(
    tiny_gpt2: Path,
    runtime: Runtime,
    client: TransformersModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ndif.host.replica_runners.MAX_EXIT_S", 0.3)
    monkeypatch.setattr(RunnerHandle, "kill", lambda _: None)
    async with serve(tiny_gpt2, runtime, strangers(tmp_path)) as served:
        assert (await served.run(lingering(client), trusted=False)).status is Status.COMPLETED
        with pytest.raises(ReplicaLostError, match="a runner could not be ended within"):
            await served.run(reading(client), trusted=False)
        await within(served.actor.ended.wait(), PATIENCE_S)


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_replica_moves_to_cache_and_back(
    trusted: bool, tiny_gpt2: Path, runtime: Runtime, client: TransformersModel, tmp_path: Path
) -> None:
    settings = strangers(tmp_path)
    folder = shutil.copytree(tiny_gpt2, tmp_path / "checkpoint")
    read, write, truth = reading(client), writing(client), expected(tiny_gpt2)
    async with serve(folder, runtime, None if trusted else settings) as served:
        assert torch.equal(await served.logits(read, trusted=trusted), truth)
        if not trusted:
            # Pending changes are undone before the weights are cached.
            assert not (await served.logits(write, trusted=False)).any()
        for name in ("model.safetensors", "config.json"):
            if trusted:  # untrusted changes are restored from these files
                (folder / name).unlink()
        loaded = served.actor.model
        for _ in range(2 if trusted else 1):
            owner = served.owner
            await served.actor.to_cache()
            # Neither the owner nor a runner is left, so nothing of theirs is on a device.
            assert children(served.zygote) == []
            assert not alive(owner)
            with pytest.raises(ReplicaLostError, match="taken off its device"):
                await served.run(read, trusted=trusted)
            await served.actor.from_cache({})
            assert served.owner != owner
            assert served.actor.model == loaded
            assert torch.equal(await served.logits(read, trusted=trusted), truth)
        # Returned weights are verified as before, and restored from memory, without files.
        if not trusted:
            for name in ("model.safetensors", "config.json"):
                (folder / name).unlink()
        assert not (await served.logits(write, trusted=trusted)).any()
        assert torch.equal(await served.logits(read, trusted=trusted), truth)
        # The next move to the cache reuses that memory.
        memory = memory_of(served.zygote)
        assert memory
        await served.actor.to_cache()
        assert memory_of(served.zygote) == memory
        await served.actor.from_cache({})
        assert torch.equal(await served.logits(read, trusted=trusted), truth)
        family = [served.zygote, *children(served.zygote)]
    await eventually(lambda: not any(map(alive, family)))


def memory_of(pid: int) -> list[int]:
    """Return the inodes of the memory files for weights that a process has open."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    return [file.stat().st_ino for file in files if "cached weights" in str(file.readlink())]


@on_loop
async def test_failed_return_from_cache_ends_replica(
    tmp_path: Path, tiny_gpt2: Path, runtime: Runtime, client: TransformersModel
) -> None:
    async with serve(tiny_gpt2, runtime) as served:
        await served.actor.to_cache()
        (tmp_path / "weights" / "fatal").touch()
        with pytest.raises(ActorError, match=r"that loads the weights ended \(-9\)"):
            await served.actor.from_cache({})
        await within(served.actor.ended.wait(), PATIENCE_S)


@on_loop
async def test_cached_gpu_model_cannot_return_to_cpu(tiny_gpt2: Path, runtime: Runtime) -> None:
    async with serve(tiny_gpt2, runtime, devices=ReplicaDevices({0: 1 << 30})) as served:
        assert served.actor.process.spec.max_memory == {0: 1 << 30}
        await served.actor.to_cache()
        with pytest.raises(ActorError, match="cannot come to the CPU"):
            await served.actor.from_cache({})


@on_loop
async def test_replica_ends_if_owner_is_killed_while_caching(
    tiny_gpt2: Path, runtime: Runtime
) -> None:
    async with serve(tiny_gpt2, runtime) as served:
        os.kill(served.owner, signal.SIGSTOP)
        leaving = asyncio.create_task(served.actor.to_cache())
        await eventually(lambda: len(children(served.zygote)) == 1)
        os.kill(served.owner, signal.SIGKILL)
        await leaving
        await within(served.actor.ended.wait(), PATIENCE_S)


@on_loop
async def test_replica_is_lost_if_owner_ends(
    tiny_gpt2: Path, runtime: Runtime, client: TransformersModel
) -> None:
    read = reading(client)
    async with serve(tiny_gpt2, runtime) as served:
        family = [served.zygote, *children(served.zygote)]
        os.kill(served.owner, signal.SIGKILL)
        await within(served.actor.process.ended.wait(), PATIENCE_S)
        with pytest.raises(ReplicaLostError, match=r"process that held the weights ended \(-9\)"):
            await served.run(read)
        await eventually(lambda: not any(map(alive, family)))


@on_loop
async def test_an_owner_ends_with_its_zygote(tiny_gpt2: Path, runtime: Runtime) -> None:
    async with serve(tiny_gpt2, runtime) as served:
        family = children(served.zygote)
        os.kill(served.zygote, signal.SIGKILL)
        await eventually(lambda: not any(map(alive, family)))


@on_loop
async def test_a_failed_load_is_reported_to_the_host(
    tmp_path: Path, tiny_gpt2: Path, runtime: Runtime
) -> None:
    (tmp_path / "nothing-is-here").mkdir()
    with pytest.raises(ModelProcessError, match="nothing-is-here"):
        async with serve(tmp_path / "nothing-is-here", runtime):
            pass


@on_loop
async def test_start_fails_if_owner_is_killed_while_loading(
    tmp_path: Path, tiny_gpt2: Path, runtime: Runtime
) -> None:
    (tmp_path / "weights" / "fatal").touch()
    with pytest.raises(ModelProcessError, match=r"that loads the weights ended \(-9\)"):
        async with serve(tiny_gpt2, runtime):
            pass


@on_loop
async def test_start_on_cuda_fails_without_cuda(tiny_gpt2: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    runtime = Runtime("0.8", "0.8", Path(sys.executable), ())
    config = DeploymentConfig("test/model", str(tiny_gpt2), device="cuda:0")
    actor = LocalModelActor(
        config,
        runtime,
        Settings(),
        MemoryBroker(),
        cast(ObjectStore, None),
        HostResources(),
        ReplicaDevices(),
        untrusted=False,
    )
    with pytest.raises(ModelProcessError, match=r"^ValueError: The model is to be on cuda:0, but"):
        await actor.start(lambda loaded, total: None)
