"""Processes that are started before it is known for which model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.on_loop import on_loop

from ndif.host.blanks import Blank, Blanks
from ndif.host.process import ModelProcess
from ndif.host.runtimes import Runtime, Runtimes
from ndif.host.weights import Weights
from ndif.runtime.spec import ModelSpec, Untrusted
from ndif.tasks import within

TASK = "text-generation"
STRANGERS = Untrusted(
    sandbox="off",
    protector=True,
    whitelist=None,
    memory_bytes=1 << 30,
    result_bytes=1 << 20,
    max_threads=64,
    adapters="/nowhere",
)


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtimes(tmp_path).installed()["0.8"]


@contextlib.asynccontextmanager
async def some(idle_s: float = 60.0) -> AsyncIterator[Blanks]:
    blanks = Blanks(idle_s)
    try:
        yield blanks
    finally:
        await blanks.stop()


async def waiting(blanks: Blanks, runtime: Runtime) -> Blank:
    """The one that waits, which stays."""
    return await asyncio.shield(blanks._waiting[runtime])


async def gone(blank: Blank) -> bool:
    await within(blank.process.wait(), 10)
    return True


def environment_of(blank: Blank) -> bytes:
    return Path(f"/proc/{blank.process.pid}/environ").read_bytes()


@on_loop
async def test_a_model_is_loaded_by_the_process_that_waited(
    runtime: Runtime, tiny_gpt2: Path
) -> None:
    async with some() as blanks:
        blanks.prepare(runtime)
        prepared = await waiting(blanks, runtime)
        spec = ModelSpec(str(tiny_gpt2), "0.8", task=TASK, untrusted=STRANGERS)
        process = ModelProcess(spec, runtime, Weights(), blanks)
        await process.start(60, lambda done, total: None)
        try:
            assert process._process is prepared.process
            assert process.model["class"] == "GPT2LMHeadModel"
        finally:
            await process.stop()
        assert await gone(prepared)


@on_loop
async def test_there_is_no_secret_in_one(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    async with some() as blanks:
        blanks.prepare(runtime)
        prepared = await waiting(blanks, runtime)
        assert b"TOKENIZERS_PARALLELISM=false" in environment_of(prepared)
        assert b"hf_secret" not in environment_of(prepared)


@on_loop
async def test_whoever_is_trusted_takes_none(runtime: Runtime, tiny_gpt2: Path) -> None:
    async with some() as blanks:
        blanks.prepare(runtime)
        prepared = await waiting(blanks, runtime)
        process = ModelProcess(
            ModelSpec(str(tiny_gpt2), "0.8", task=TASK), runtime, Weights(), blanks
        )
        await process.start(60, lambda done, total: None)
        try:
            assert process._process is not prepared.process
        finally:
            await process.stop()


@on_loop
async def test_one_waits_however_often_it_is_asked_for(runtime: Runtime) -> None:
    async with some() as blanks:
        for _ in range(3):
            blanks.prepare(runtime)
        first = await blanks.take(runtime)
        second = await blanks.take(runtime)
        assert first.process.pid != second.process.pid
        assert not blanks._waiting
        for each in (first, second):
            await each.end()
            assert await gone(each)


@on_loop
async def test_one_that_was_killed_is_not_given_away(runtime: Runtime) -> None:
    async with some() as blanks:
        blanks.prepare(runtime)
        prepared = await waiting(blanks, runtime)
        os.kill(prepared.process.pid, signal.SIGKILL)
        await prepared.process.wait()
        taken = await blanks.take(runtime)
        assert taken.process.returncode is None
        await taken.end()


@on_loop
async def test_one_that_nobody_takes_ends(runtime: Runtime) -> None:
    async with some(idle_s=0.05) as blanks:
        blanks.prepare(runtime)
        assert await gone(await waiting(blanks, runtime))
        # And another may be asked for.
        blanks.prepare(runtime)
        taken = await blanks.take(runtime)
        await asyncio.sleep(0.1)
        assert taken.process.returncode is None
        await taken.end()


@on_loop
async def test_those_that_wait_end_with_the_server(runtime: Runtime) -> None:
    async with some() as blanks:
        blanks.prepare(runtime)
        prepared = await waiting(blanks, runtime)
    assert await gone(prepared)


@on_loop
async def test_a_runtime_that_cannot_be_started_says_so_to_who_takes_it(tmp_path: Path) -> None:
    broken = Runtime("0.8", "0.8.1", tmp_path / "no-python", ())
    async with some() as blanks:
        blanks.prepare(broken)
        with pytest.raises(OSError, match="no-python"):
            await blanks.take(broken)
        blanks.prepare(broken)
