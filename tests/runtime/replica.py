"""A replica driven by the host's code, blocks to send to it, and its processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import zstandard
from nnsight import TransformersModel
from nnsight.ndif import pull_env
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend
from transformers import AutoModelForCausalLM, AutoTokenizer

from ndif.config.settings import Settings
from ndif.host.fork_server import ForkServers, Process
from ndif.host.model_actor import HostResources, LocalModelActor, ReplicaDevices
from ndif.host.runtimes import Runtime
from ndif.host.watchdogs import GpuWatch
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response
from ndif.schema.status import Status
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import ObjectStore
from tests.processes import children

PROMPT = "The Eiffel Tower is in"
HERE = Runtime("0.8", "0.8", Path(sys.executable), ())
"""The interpreter of the tests."""


_FORK_SERVERS = ForkServers()
_PRETENDING = "pretending"
"""Name of an interpreter whose model processes have an owner."""
_SET_HERE = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTHONBREAKPOINT", "RAY_")
"""Prefixes of variables that pytest, torch and Ray set in this process and that no server has."""
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(_SET_HERE)}


async def fork_servers(*, untrusted: bool = False) -> ForkServers:
    """Return fork servers that all tests of this process share; one of them is ready.

    Processes that run untrusted code have a separate server.

    A test that changed the environment gets newly started processes.
    """
    if _has_first_environment():
        _FORK_SERVERS.prepare(HERE, untrusted=untrusted)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            first = await _FORK_SERVERS.start(
                HERE, "ndif.runtime.measure", theirs, untrusted=untrusted, keep_output=False
            )
        await first.wait()
    return _FORK_SERVERS


@dataclass
class PretendingForkServers:
    """The part of `ForkServers` that a replica uses. Its processes have an owner; files stand for a GPU."""

    folder: Path

    async def start(
        self,
        _: Runtime,
        module: str,
        channel: socket.socket,
        *,
        untrusted: bool,
        keep_output: bool = True,
    ) -> Process:
        """See `ForkServers.start`."""
        servers = await fork_servers(untrusted=untrusted)
        if module == "ndif.runtime":
            module = f"tests.runtime.process.pretend_driver {self.folder}"
        return await servers.start(
            HERE, module, channel, untrusted=untrusted, keep_output=keep_output
        )


def _has_first_environment() -> bool:
    # Otherwise each test would have another environment. The variables are set again before they are read.
    for name in [name for name in os.environ if name.startswith(_SET_HERE)]:
        del os.environ[name]
    return os.environ == _ENVIRONMENT


def pretending(folder: Path) -> Runtime:
    """Return an interpreter whose model processes have an owner; files in `folder` stand for a GPU."""
    weights = folder / "weights"
    weights.mkdir(parents=True)
    program = Path(__file__).parent / "process" / "pretend_driver.py"
    interpreter = folder / _PRETENDING
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$3" {weights}\n')
    interpreter.chmod(0o755)
    return Runtime("0.8", "0.8", interpreter, ())


class Sent(Backend):
    """Return the payload that a client would send."""

    payload: bytes

    def __call__(self, tracer: Any) -> None:
        pull_env()
        self.payload = RequestModel.serialize(tracer, compress=False)


def reading(client: TransformersModel) -> bytes:
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        logits = client.lm_head.output.save()  # noqa: F841 - what comes back
    return sent.payload


def writing(client: TransformersModel) -> bytes:
    """Return a block that overwrites a weight."""
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


def sleeping(client: TransformersModel, seconds: float) -> bytes:
    """Return a block that sleeps for `seconds`."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        time.sleep(seconds)
    return sent.payload


def lasting(client: TransformersModel) -> bytes:
    """Return a block that prints and then sleeps for an hour."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        print("begun")
        time.sleep(3600)
    return sent.payload


def expected(checkpoint: Path) -> torch.Tensor:
    """Return the logits of the prompt, without nnsight, whose traces would disturb pytest's process."""
    tokens = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    return cast(torch.Tensor, model(**tokens).logits)


class Served:
    """A model and its replica."""

    def __init__(self, actor: LocalModelActor) -> None:
        self.actor = actor
        self.progress: list[tuple[int, int]] = []
        self.begun = asyncio.Event()
        """Set once a block has printed something."""
        self.is_read = True
        """True if the client reads the blocks' output."""

    async def start(self) -> None:
        await self.actor.start(lambda loaded, total: self.progress.append((loaded, total)))

    async def run(
        self,
        payload: bytes,
        *,
        trusted: bool = True,
        key: str = "",
        env: Mapping[str, Any] | None = None,
        polled: bool = False,
    ) -> Response:
        request = a_request(payload, trusted=trusted, key=key, env=env, polled=polled)
        self.begun.clear()

        async def respond(response: Response) -> bool:
            if response.status is Status.LOG:
                self.begun.set()
                await (asyncio.sleep(0) if self.is_read else asyncio.Event().wait())
            return True

        return await self.actor.run(request, respond)

    async def saves(self, payload: bytes, *, trusted: bool = True, key: str = "") -> dict[str, Any]:
        return values_of(await self.run(payload, trusted=trusted, key=key))

    async def logits(self, payload: bytes, *, trusted: bool = True, key: str = "") -> torch.Tensor:
        saves = await self.saves(payload, trusted=trusted, key=key)
        return cast(torch.Tensor, saves["logits"])

    @property
    def zygote(self) -> int:
        process = self.actor.process._process
        assert process is not None
        return process.pid

    @property
    def owner(self) -> int:
        """The first child, which is the owner if there is one."""
        return min(children(self.zygote))


def a_request(
    payload: bytes,
    *,
    trusted: bool = True,
    key: str = "",
    env: Mapping[str, Any] | None = None,
    polled: bool = False,
    compress: bool = False,
) -> Request:
    return Request(
        DeploymentConfig("test/model", "").key,
        "0.8",
        Wire.ENVELOPE,
        payload,
        compress,
        "http://here",
        subscription_id=None if polled else "me",
        trusted=trusted,
        key=key,
        env=env or {},
    )


def values_of(response: Response) -> dict[str, Any]:
    """Return a job's saved values from a response with an inline result."""
    assert response.status is Status.COMPLETED, response.description
    assert isinstance(response.data, InlineResult)
    content = response.data.content
    if response.data.compressed:
        content = zstandard.decompress(content)
    return cast(dict[str, Any], torch.load(io.BytesIO(content), weights_only=False))


def state(pid: int) -> str:
    """Return the state letter of a process, as in proc(5), or "" if the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def alive(pid: int) -> bool:
    return state(pid) not in {"", "Z"}


def a_replica(
    checkpoint: Path,
    runtime: Runtime = HERE,
    settings: Settings | None = None,
    objects: ObjectStore | None = None,
    trusting: Settings | None = None,
    fork_servers: ForkServers | None = None,
    gpu_watch: GpuWatch | None = None,
    devices: ReplicaDevices | None = None,
) -> Served:
    """Return a replica that is not started. `settings` are for a server without trusted users.

    `trusting` are for a server with trusted users.
    """
    config = DeploymentConfig("test/model", str(checkpoint), task="text-generation")
    actor = LocalModelActor(
        config,
        runtime,
        settings or trusting or Settings(),
        MemoryBroker(),
        cast(ObjectStore, objects),
        HostResources(fork_servers=fork_servers or ForkServers(), gpu_watch=gpu_watch),
        devices or ReplicaDevices(),
        untrusted=settings is not None,
    )
    return Served(actor)


@contextlib.asynccontextmanager
async def serve(
    checkpoint: Path, runtime: Runtime = HERE, settings: Settings | None = None, **given: Any
) -> AsyncIterator[Served]:
    """Yield a started replica; stop it at the end."""
    if runtime is HERE:
        given.setdefault("fork_servers", await fork_servers(untrusted=settings is not None))
    elif runtime.interpreter.name == _PRETENDING and _has_first_environment():
        weights = runtime.interpreter.parent / "weights"
        given.setdefault("fork_servers", cast(ForkServers, PretendingForkServers(weights)))
    served = a_replica(checkpoint, runtime, settings, **given)
    await served.start()
    try:
        yield served
    finally:
        await served.actor.stop()
