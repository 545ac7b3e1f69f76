"""An owner, its zygote and their runners, driven by the host's own code as on GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from nnsight import TransformersModel
from nnsight.ndif import pull_env
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend
from transformers import AutoModelForCausalLM, AutoTokenizer

from ndif.config import Settings
from ndif.host.actor import ModelActor, ReplicaLostError
from ndif.host.process import ModelProcessError
from ndif.host.runtimes import Runtime
from ndif.host.weights import Weights
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker
from ndif.stores.objects import ObjectStore
from tests.on_loop import on_loop

PROGRAM = Path(__file__).with_name("owner_on_cpu.py")
PROMPT = "The Eiffel Tower is in"


class Sent(Backend):
    """What a client would send."""

    payload: bytes

    def __call__(self, tracer: Any) -> None:
        pull_env()
        self.payload = RequestModel.serialize(tracer, compress=False)


@pytest.fixture(scope="module")
def client(tiny_gpt2: Path) -> TransformersModel:
    return TransformersModel(str(tiny_gpt2), task="text-generation")


def reading(client: TransformersModel) -> bytes:
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        logits = client.lm_head.output.save()  # noqa: F841 - what comes back
    return sent.payload


def writing(client: TransformersModel) -> bytes:
    """A block that overwrites a weight."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        client.lm_head.weight.data.zero_()
        logits = client.lm_head.output.save()  # noqa: F841
    return sent.payload


def dying(client: TransformersModel) -> bytes:
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        os.kill(os.getpid(), 11)
    return sent.payload


def expected(checkpoint: Path) -> torch.Tensor:
    """The logits of the prompt, without nnsight: what traces do to a process pytest does not bear."""
    tokens = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    return cast(torch.Tensor, model(**tokens).logits)


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """An interpreter whose model processes have an owner."""
    weights = tmp_path / "weights"
    weights.mkdir()
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$3" {weights}\n')
    interpreter.chmod(0o755)
    return Runtime("0.8", "0.8", interpreter, ())


class Served:
    """A model and its replica."""

    def __init__(self, actor: ModelActor) -> None:
        self.actor = actor
        self.progress: list[tuple[int, int]] = []

    async def run(self, payload: bytes, *, trusted: bool = True) -> Response:
        request = Request(
            self.actor_key,
            "0.8",
            Wire.ENVELOPE,
            payload,
            False,
            "http://here",
            session="me",
            trusted=trusted,
        )

        async def respond(response: Response) -> None:
            pass

        return await self.actor(request, respond)

    async def logits(self, payload: bytes, *, trusted: bool = True) -> torch.Tensor:
        response = await self.run(payload, trusted=trusted)
        assert response.status is Status.COMPLETED, response.description
        assert isinstance(response.data, InlineResult)
        saves = torch.load(io.BytesIO(response.data.content), weights_only=False)
        return cast(torch.Tensor, saves["logits"])

    @property
    def actor_key(self) -> Any:
        return DeploymentConfig("test/model", "").key

    @property
    def zygote(self) -> int:
        process = self.actor.process._process
        assert process is not None
        return process.pid

    @property
    def owner(self) -> int:
        """The child that came first."""
        return min(children(self.zygote))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serve(
    checkpoint: Path, runtime: Runtime, settings: Settings | None = None
) -> AsyncIterator[Served]:
    """`settings`: of a server that trusts nobody."""
    config = DeploymentConfig("test/model", str(checkpoint), task="text-generation")
    actor = ModelActor(
        config,
        runtime,
        settings or Settings(),
        cast(Broker, None),
        cast(ObjectStore, None),
        Weights(),
        untrusted=settings is not None,
    )
    served = Served(actor)
    await actor.start(lambda done, total: served.progress.append((done, total)))
    try:
        yield served
    finally:
        await actor.stop()


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
        cast(Broker, None),
        cast(ObjectStore, None),
        Weights(),
        untrusted=False,
    )
    with pytest.raises(ModelProcessError, match=r"^ValueError: The model is to be on cuda:0, but"):
        await actor.start(lambda done, total: None)
