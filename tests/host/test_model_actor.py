"""A replica on the CPU with a real model process: caching, return, cancellation and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight import TransformersModel

from ndif.config.settings import Settings
from ndif.host import request_run
from ndif.host.execution import Exchange
from ndif.host.model_actor import ReplicaDevices
from ndif.host.port import ActorError, ModelActor, ReplicaEvictedError, ReplicaLostError
from ndif.host.runner_protocol import LimitReason
from ndif.host.watchdogs import ResourceWatchdog
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.objects import FileStore, MemoryFullError, Upload
from ndif.stores.objects.result_quota import ResultQuotaLimits
from ndif.tasks import within
from tests.conftest import ADAPTER
from tests.failures import retry
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.replica import (
    HERE,
    PROMPT,
    Sent,
    Served,
    a_replica,
    alive,
    dying,
    expected,
    fork_servers,
    lasting,
    reading,
    serve,
    state,
    values_of,
    writing,
)
from tests.stores.small_disk import fill, small_disk
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = [pytest.mark.process, pytest.mark.slow]

__all__ = ["small_disk"]


@pytest.fixture(scope="module")
def client(tiny_gpt2: Path) -> TransformersModel:
    return TransformersModel(str(tiny_gpt2), task="text-generation")


@pytest.fixture
def strict(tmp_path: Path) -> Settings:
    """Settings of a sandboxed server."""
    return Settings(session_root=tmp_path / "session")


async def begun(served: Served, payload: bytes, *, trusted: bool = True) -> asyncio.Task[Response]:
    """Start a block and wait until it runs; return its task."""
    running = asyncio.create_task(served.run(payload, trusted=trusted))
    await asyncio.wait(
        {running, asyncio.create_task(served.begun.wait())}, return_when="FIRST_COMPLETED"
    )
    assert not running.done(), running.result()
    return running


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_replica_returns_from_cache_without_its_files(
    trusted: bool, tiny_gpt2: Path, client: TransformersModel, strict: Settings, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "checkpoint")
    read, truth = reading(client), expected(tiny_gpt2)
    async with serve(folder, settings=None if trusted else strict) as served:
        actor: ModelActor = served.actor
        assert torch.equal(await served.logits(read, trusted=trusted), truth)
        # The weights return from memory: the files may be gone.
        shutil.rmtree(folder)
        for _ in range(2):
            zygote = served.zygote
            await actor.to_cache()
            await eventually(lambda zygote=zygote: not children(zygote))
            assert alive(zygote)
            # This is no error of the job, and no reason to end the process.
            with pytest.raises(ReplicaEvictedError, match="taken off its device"):
                await served.run(read, trusted=trusted)

            await actor.from_cache({})
            assert served.zygote == zygote
            assert children(zygote)
            assert torch.equal(await served.logits(read, trusted=trusted), truth)
        assert not actor.ended.is_set()
        assert actor.model.class_name == "GPT2LMHeadModel"


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_running_job_is_evicted_with_its_replica(
    trusted: bool, tiny_gpt2: Path, client: TransformersModel, strict: Settings
) -> None:
    last, read = lasting(client), reading(client)
    settings = None if trusted else strict.model_copy(update={"protector": "off"})
    async with serve(tiny_gpt2, settings=settings) as served:
        running = await begun(served, last, trusted=trusted)
        await served.actor.to_cache()
        await eventually(lambda: not children(served.zygote))
        assert running.done()
        with pytest.raises(ReplicaEvictedError, match="taken off its device"):
            await running
        await served.actor.from_cache({})
        assert (await served.run(read, trusted=trusted)).status is Status.COMPLETED

        running = await begun(served, last, trusted=trusted)
        await served.actor.stop()
        with pytest.raises(ReplicaEvictedError, match="was ended"):
            await running
        assert served.actor.ended.is_set()


@on_loop
async def test_trusted_and_untrusted_requests_use_hub_adapters_on_one_replica(
    tiny_gpt2: Path,
    tiny_adapter: Path,
    client: TransformersModel,
    strict: Settings,
    hub_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model process has no token and no access to a hub."""
    monkeypatch.setenv("HF_ENDPOINT", hub_url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    read = reading(client)
    settings = strict.model_copy(update={"sandbox": "off"})
    async with serve(tiny_gpt2, settings=settings) as served:
        plain = await served.logits(read)
        for trusted, named in ((True, ADAPTER), (True, str(tiny_adapter)), (False, ADAPTER)):
            response = await served.run(read, trusted=trusted, env={"peft": named})
            adapted = values_of(response)["logits"]
            assert not torch.equal(adapted, plain)
        assert torch.equal(await served.logits(read), plain)


@on_loop
async def test_job_waiting_for_runner_is_evicted_with_its_replica(
    tiny_gpt2: Path, client: TransformersModel, strict: Settings
) -> None:
    """The job may wait for a runner that is being forked, warmed up or confined."""
    read = reading(client)
    pool_of_one = strict.model_copy(update={"runner_pool": 1})
    async with serve(tiny_gpt2, settings=pool_of_one) as served:
        for turns in (0, 1, 2, 5, 10, 20, 40, 80):
            # The next request finds no waiting runner: one is being forked, or will be.
            assert (await served.run(read, trusted=False)).status is Status.COMPLETED
            running = asyncio.create_task(served.run(read, trusted=False))
            for _ in range(turns):
                await time_passes_async(turns * 1e-4)
            await served.actor.to_cache()
            assert running.done()
            await eventually(lambda: not children(served.zygote))
            if (error := running.exception()) is None:
                assert running.result().status is Status.COMPLETED
            else:
                assert isinstance(error, ReplicaLostError), error
            await served.actor.from_cache({})
            assert (await served.run(read, trusted=False)).status is Status.COMPLETED


@on_loop
async def test_cancelled_job_stays_error_after_eviction(
    tiny_gpt2: Path, client: TransformersModel
) -> None:
    last = lasting(client)
    async with serve(tiny_gpt2) as served:
        running = await begun(served, last)
        served.actor.cancel("The client left.")
        await served.actor.to_cache()
        response = await running
        assert (response.status, response.description) == (Status.ERROR, "The client left.")


@on_loop
async def test_job_is_cancelled_though_its_client_does_not_read(
    tiny_gpt2: Path, client: TransformersModel
) -> None:
    last = lasting(client)
    async with serve(tiny_gpt2) as served:
        served.is_read = False
        running = await begun(served, last)
        served.actor.cancel("The operator has ended it.")
        response = await within(running, PATIENCE_S)
        assert response.description == "The operator has ended it."
        served.is_read = True
        assert (await served.run(reading(client))).status is Status.COMPLETED


@on_loop
async def test_job_cancelled_while_its_result_is_stored_is_error(
    tiny_gpt2: Path, client: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tiny_gpt2) as served:
        run = Exchange.run

        async def cancelled_last(*given: Any) -> Response | None:
            response = await run(*given)
            served.actor.cancel("The operator has ended it.")
            return response

        monkeypatch.setattr(Exchange, "run", cancelled_last)
        response = await served.run(reading(client))
        assert (response.status, response.description) == (
            Status.ERROR,
            "The operator has ended it.",
        )
        monkeypatch.undo()
        assert (await served.run(reading(client))).status is Status.COMPLETED


@on_loop
async def test_result_fails_if_disk_is_full(
    tiny_gpt2: Path, client: TransformersModel, small_disk: Path
) -> None:
    async with serve(tiny_gpt2, objects=FileStore(small_disk, 60)) as served:
        fill(small_disk).touch()
        response = await served.run(reading(client), polled=True)
        assert response.status is Status.ERROR
        assert "its result could not be stored: the server's disk is full" in response.description


class Narrow(FileStore):
    """A store on a machine whose memory has room for one result."""

    is_full = False

    async def create_for(self, size: int) -> Upload:
        if self.is_full:
            raise MemoryFullError(f"it takes {size} bytes")
        self.is_full = True
        return self.create()


@on_loop
async def test_result_fails_if_memory_is_full(
    tiny_gpt2: Path, client: TransformersModel, strict: Settings, tmp_path: Path
) -> None:
    settings = strict.model_copy(update={"max_inline_result_bytes": 0})
    objects, read = Narrow(tmp_path, 60), reading(client)
    async with serve(tiny_gpt2, settings=settings, objects=objects) as served:
        assert (await served.run(read, trusted=False)).status is Status.COMPLETED
        response = await served.run(read, trusted=False)
        assert response.status is Status.ERROR
        assert "its result could not be stored: it takes" in response.description
        objects.is_full = False
        assert (await served.run(read, trusted=False)).status is Status.COMPLETED


@pytest.mark.parametrize("polled", [True, False])
@on_loop
async def test_stored_results_of_untrusted_user_are_limited_by_quota(
    polled: bool, tiny_gpt2: Path, client: TransformersModel, strict: Settings, tmp_path: Path
) -> None:
    # Sent in a frame, and written into a file.
    inline = strict.max_inline_result_bytes if polled else 0
    settings = strict.model_copy(update={"max_inline_result_bytes": inline})
    objects, read = FileStore(tmp_path / "results", 3600), reading(client)
    async with serve(tiny_gpt2, settings=settings, objects=objects) as served:
        assert (await served.run(read, trusted=False, polled=polled)).status is Status.COMPLETED
        [stored] = (await objects.unexpired("results")).values()
        objects.limits = ResultQuotaLimits(4 * stored.size, 0.5)
        assert (await served.run(read, trusted=False, polled=polled)).status is Status.COMPLETED
        response = await served.run(read, trusted=False, polled=polled)
        assert response.status is Status.ERROR
        assert "was not stored: your stored results take" in response.description
        assert "NDIF_MAX_STORED_SHARE" in response.description
        assert [*objects.root.glob(".ndif-part-*")] == []
        assert len(await objects.unexpired("results")) == 2
        for name in await objects.unexpired("results"):
            await objects.delete(f"results/{name}")
        assert (await served.run(read, trusted=False, polled=polled)).status is Status.COMPLETED


def kill_runners(served: Served) -> None:
    for runner in children(served.zygote):
        with contextlib.suppress(ProcessLookupError):  # a rehearsal has ended meanwhile
            os.kill(runner, signal.SIGKILL)


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_killed_idle_runners_cost_no_job(
    trusted: bool, tiny_gpt2: Path, client: TransformersModel, strict: Settings
) -> None:
    read, last = reading(client), lasting(client)
    settings = None if trusted else strict.model_copy(update={"protector": "off"})
    async with serve(tiny_gpt2, settings=settings) as served:
        kill_runners(served)
        # The host has not noticed their end yet.
        assert (await served.run(read, trusted=trusted)).status is Status.COMPLETED
        # A started block is not rerun.
        running = await begun(served, last, trusted=trusted)
        kill_runners(served)
        response = await running
        assert response.status is Status.ERROR
        assert "SIGKILL" in response.description


@on_loop
async def test_runner_over_limits_between_requests_is_ended(
    tiny_gpt2: Path, client: TransformersModel, strict: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_too_much = False

    def exceeded(*_: object) -> LimitReason | None:
        return LimitReason("It is too much.", "memory") if is_too_much else None

    monkeypatch.setattr("ndif.host.runner_pool._STOPPED_AFTER_S", 60.0)
    monkeypatch.setattr(ResourceWatchdog, "exceeded", exceeded)
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        logits = torch.tensor(os.getpid()).save()  # noqa: F841
    settings = strict.model_copy(update={"protector": "off"})
    async with serve(tiny_gpt2, settings=settings) as served:
        first = int((await served.logits(sent.payload, trusted=False, key="one")).item())
        assert alive(first)
        is_too_much = True
        await eventually(lambda: not alive(first))
        is_too_much = False
        second = int((await served.logits(sent.payload, trusted=False, key="one")).item())
        assert second != first


@on_loop
async def test_killed_model_process_loses_replica_and_job(
    tiny_gpt2: Path, client: TransformersModel
) -> None:
    last = lasting(client)
    async with serve(tiny_gpt2) as served:
        running = await begun(served, last)
        os.kill(served.zygote, signal.SIGKILL)
        await within(served.actor.ended.wait(), PATIENCE_S)
        # Stopping afterwards is not the reason why the job ended.
        await served.actor.stop()
        with pytest.raises(ReplicaLostError) as lost:
            await running
        assert not isinstance(lost.value, ReplicaEvictedError)


@on_loop
async def test_model_process_killed_in_cache_cannot_return(
    tiny_gpt2: Path, client: TransformersModel
) -> None:
    async with serve(tiny_gpt2) as served:
        await served.actor.to_cache()
        os.kill(served.zygote, signal.SIGKILL)
        await within(served.actor.ended.wait(), PATIENCE_S)
        with pytest.raises(ActorError, match="the model process ended"):
            await served.actor.from_cache({})
        await served.actor.to_cache()  # there is nothing to do, and that is no error


@on_loop
async def test_cpu_replica_ignores_declared_gpus(
    tiny_gpt2: Path, client: TransformersModel
) -> None:
    async with serve(tiny_gpt2, devices=ReplicaDevices(device="cpu")) as served:
        await served.actor.to_cache()
        await served.actor.from_cache({0: 1 << 30})
        assert served.actor.model.device == "cpu"
        assert torch.equal(await served.logits(reading(client)), expected(tiny_gpt2))


@on_loop
async def test_weights_are_intact_after_crash_write_and_return_from_cache(
    tiny_gpt2: Path, client: TransformersModel
) -> None:
    read, truth = reading(client), expected(tiny_gpt2)
    async with serve(tiny_gpt2) as served:
        assert (await served.run(dying(client))).status is Status.ERROR
        assert not (await served.logits(writing(client))).any()
        await served.actor.to_cache()
        await served.actor.from_cache({})
        # A runner's own copy of the weights goes with it.
        assert torch.equal(await served.logits(read), truth)


@on_loop
async def test_replica_stopped_while_loading_leaves_no_process(tiny_gpt2: Path) -> None:
    served = a_replica(tiny_gpt2)
    starting = asyncio.create_task(served.start())
    await eventually(lambda: served.actor.process._process is not None)
    zygote = served.zygote
    await served.actor.stop()
    with pytest.raises(ActorError, match="ended while it was loaded"):
        await starting
    assert served.actor.ended.is_set()
    assert not alive(zygote)


@on_loop
async def test_unstarted_replica_rejects_request(tiny_gpt2: Path) -> None:
    served = a_replica(tiny_gpt2)
    assert served.actor.model is None
    with pytest.raises(ReplicaLostError, match="not been started"):
        await served.run(b"")


@on_loop
async def test_missing_checkpoint_fails_to_load(tmp_path: Path) -> None:
    served = a_replica(tmp_path / "nothing-is-here")
    with pytest.raises(ActorError, match="nothing-is-here"):
        await served.start()
    assert served.actor.ended.is_set()


ENDS_ITS_RUNNERS = """\
import os, sys

def end():
    if "transformers.models.gpt2.modeling_gpt2" in sys.modules:
        print("Traceback (most recent call last):\\n  File", file=sys.stderr)
        print("RuntimeError: these tensors\\ncannot be mapped", file=sys.stderr, flush=True)
        os._exit(7)

os.register_at_fork(after_in_child=end)
"""
"""A module that Python imports first; it ends every fork of a process with a model."""


@on_loop
async def test_load_fails_with_last_words_of_failed_runner(tiny_gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDS_ITS_RUNNERS)
    served = a_replica(tiny_gpt2, replace(HERE, path=(tmp_path,)))
    with pytest.raises(ActorError) as caught:
        await served.start()
    assert str(caught.value) == (
        "a runner ended before it was ready (exit code 7); its last words: RuntimeError: these tensors; "
        "cannot be mapped"
    )
    assert served.actor.ended.is_set()


@on_loop
async def test_replica_uses_given_device(tiny_gpt2: Path) -> None:
    async with serve(tiny_gpt2, devices=ReplicaDevices(device="cpu")) as served:
        assert served.actor.process.spec.device == "cpu"
        assert served.actor.model.device == "cpu"


def test_cuda_context_memory_is_reserved_from_tensors(tiny_gpt2: Path) -> None:
    gpus, none = ReplicaDevices({1: 100, 2: 80}, 30), ReplicaDevices({}, 30)
    assert a_replica(tiny_gpt2, devices=gpus).actor.process.spec.max_memory == {1: 70, 2: 50}
    assert a_replica(tiny_gpt2, devices=none).actor.process.spec.max_memory is None


async def rehearsal_of(zygote: int) -> int:
    """Stop and return the first fork; a child that is about to run another program continues."""
    while True:
        for child in children(zygote):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(child, signal.SIGSTOP)
                # It has closed its parent's channel, and so will end with its parent.
                channel = command_of(zygote).rstrip(b"\0").rpartition(b"\0")[2].decode()
                is_apart = channel not in open_files(child)
                if is_apart and command_of(child) == command_of(zygote) and state(zygote) != "D":
                    return child
                os.kill(child, signal.SIGCONT)
        await asyncio.sleep(0.001)


def open_files(pid: int) -> set[str]:
    return {file.name for file in Path(f"/proc/{pid}/fd").iterdir()}


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@on_loop
async def test_zygote_killed_during_rehearsal_is_detected_and_leaves_no_process(
    tiny_gpt2: Path, client: TransformersModel, strict: Settings
) -> None:
    """Three zygotes are killed; each is noticed at once and leaves no process. The fourth serves."""
    settings = strict.model_copy(update={"model_start_timeout_s": PATIENCE_S})
    servers = await fork_servers(untrusted=True)
    for _ in range(3):
        served = a_replica(tiny_gpt2, settings=settings, fork_servers=servers)
        starting = asyncio.create_task(served.start())
        await eventually(lambda served=served: served.actor.process._process is not None)
        rehearsal = await rehearsal_of(served.zygote)  # one that takes its time
        os.kill(served.zygote, signal.SIGKILL)
        # The first runner, which does not wait for the rehearsal, may have been ready.
        with contextlib.suppress(ActorError):
            await within(starting, PATIENCE_S)
        await eventually(lambda rehearsal=rehearsal: not alive(rehearsal))
        await eventually(served.actor.ended.is_set)
    async with serve(tiny_gpt2, settings=settings) as served:
        response = await served.run(reading(client), trusted=False)
        assert response.status is Status.COMPLETED


# Frozen processes


FROZEN_S = 1.5


@contextlib.asynccontextmanager
async def impatient(
    checkpoint: Path, settings: Settings, frozen_s: float = FROZEN_S, *, starts: bool = True
) -> AsyncIterator[Served]:
    """A replica whose processes count as frozen after a short time."""
    servers = await fork_servers(untrusted=True)
    served = a_replica(checkpoint, settings=settings, fork_servers=servers)
    served.actor.process.frozen_s = frozen_s
    if starts:
        await served.start()
    try:
        yield served
    finally:
        await served.actor.stop()


@on_loop
async def test_frozen_model_process_is_ended_and_loses_its_job(
    tiny_gpt2: Path, client: TransformersModel, strict: Settings
) -> None:
    """The running runner would continue, but no other request could get a runner."""
    async with impatient(tiny_gpt2, strict) as served:
        # An idle process is not ended.
        await time_passes_async(FROZEN_S * 1.2)
        assert not served.actor.ended.is_set()
        running = await begun(served, lasting(client), trusted=False)
        os.kill(served.zygote, signal.SIGSTOP)
        with pytest.raises(ReplicaLostError) as lost:
            await within(running, PATIENCE_S)
        assert not isinstance(lost.value, ReplicaEvictedError)
        assert served.actor.ended.is_set()
        with pytest.raises(ReplicaLostError, match=r"no sign of life for 1\.5s"):
            await served.run(reading(client), trusted=False)


@on_loop
async def test_model_process_frozen_while_loading_fails_load(
    tiny_gpt2: Path, strict: Settings
) -> None:
    async with impatient(tiny_gpt2, strict, starts=False) as served:
        starting = asyncio.create_task(served.start())
        await eventually(lambda: served.actor.process._process is not None)
        frozen = served.zygote
        os.kill(frozen, signal.SIGSTOP)
        with pytest.raises(ActorError, match="no sign of life"):
            await within(starting, PATIENCE_S)
        await eventually(lambda: not alive(frozen))


@on_loop
async def test_frozen_rehearsal_does_not_delay_requests(
    tiny_gpt2: Path, client: TransformersModel, strict: Settings
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        while True:
            served = await stack.enter_async_context(impatient(tiny_gpt2, strict, starts=False))
            starting = asyncio.create_task(served.start())
            process = served.actor.process
            await eventually(lambda process=process: process._process is not None)
            frozen = await rehearsal_of(served.zygote)
            try:
                await within(starting, PATIENCE_S)
                break
            except ActorError as error:
                retry("a rehearsal that freezes", f"the first runner was stopped: {error}")
        for _ in range(3):
            response = await served.run(reading(client), trusted=False)
            assert response.status is Status.COMPLETED
        await time_passes_async(FROZEN_S * 1.2)
        assert not served.actor.ended.is_set()
        assert alive(frozen)
    await eventually(lambda: not alive(frozen))


@on_loop
async def test_job_on_frozen_process_can_time_out_and_be_cancelled(
    tiny_gpt2: Path,
    client: TransformersModel,
    strict: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job's time limit counts from its dispatch, and its client may leave at any time."""
    monkeypatch.setattr("ndif.host.runner_pool._DELIVERY_S", 60.0)  # no runner is forked ahead
    settings = strict.model_copy(update={"runner_pool": 1, "protector": "off"})
    read, last = reading(client), lasting(client)
    async with impatient(tiny_gpt2, settings, frozen_s=2 * PATIENCE_S) as served:
        assert (await served.run(read, trusted=False)).status is Status.COMPLETED
        os.kill(served.zygote, signal.SIGSTOP)
        served.actor.timeout_s = 1.0
        response = await within(served.run(read, trusted=False), PATIENCE_S)
        assert response.status is Status.ERROR
        assert "NDIF_EXECUTION_TIMEOUT_SECONDS" in response.description

        served.actor.timeout_s = 3600.0
        running = asyncio.create_task(served.run(read, trusted=False))
        await eventually(lambda: served.actor.state.is_busy)
        served.actor.cancel("The client left.")
        assert (await within(running, PATIENCE_S)).description == "The client left."

        os.kill(served.zygote, signal.SIGCONT)
        assert (await served.run(read, trusted=False)).status is Status.COMPLETED
        # A runner that is stopped in the middle of a block.
        running = await begun(served, last, trusted=False)
        runner = served.actor.state.runner_pid
        assert runner is not None
        os.kill(runner, signal.SIGSTOP)
        served.actor.cancel("The client left.")
        assert (await within(running, PATIENCE_S)).description == "The client left."
        assert (await served.run(read, trusted=False)).status is Status.COMPLETED


@on_loop
async def test_runner_frozen_before_its_block_is_replaced(
    tiny_gpt2: Path, client: TransformersModel, strict: Settings
) -> None:
    pool_of_one = strict.model_copy(update={"runner_pool": 1})
    async with impatient(tiny_gpt2, pool_of_one) as served:
        await eventually(lambda: len(children(served.zygote)) == 1)  # the rehearsal has ended
        (runner,) = children(served.zygote)
        os.kill(runner, signal.SIGSTOP)
        running = served.run(reading(client), trusted=False)
        assert (await within(running, PATIENCE_S)).status is Status.COMPLETED
        assert not alive(runner)


def looping(client: TransformersModel) -> bytes:
    """A block with a loop that has no end."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        client.lm_head.output.save()
        number = 0
        while True:
            number += 1  # without end
    return sent.payload


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_timeout_error_names_line_of_endless_loop(
    trusted: bool,
    tiny_gpt2: Path,
    client: TransformersModel,
    strict: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_run, "_INTERRUPT_S", PATIENCE_S)
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{key: of-a-colleague, tags: [trusted]}]")
    settings = strict.model_copy(update={"execution_timeout_seconds": 2, "api_keys": keys})
    read = reading(client)
    async with serve(tiny_gpt2, settings=settings) as served:
        await served.run(read, trusted=trusted)
        response = await served.run(looping(client), trusted=trusted)
        assert response.status is Status.ERROR
        assert response.description.startswith("The job ran longer than 2s")
        assert "NDIF_EXECUTION_TIMEOUT_SECONDS" in response.description
        _, _, line = response.description.partition("in looping\n    ")
        assert line.startswith(("number += 1", "while True:")), response.description
        assert (await served.run(read, trusted=trusted)).status is Status.COMPLETED
