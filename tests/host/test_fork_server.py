"""Fork servers, and a comparison of their children with started processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndif.host.evaluation import Evaluator
from ndif.host.fork_server import ForkedProcess, ForkServers, Process, StartedProcess
from ndif.host.model_process import ModelProcess, ModelProcessError
from ndif.host.runtimes import Runtime
from ndif.host.shared_weights import SharedWeights
from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import StartModule
from ndif.runtime.process.fork_server import STATUS
from ndif.runtime.spec import ModelSpec, UntrustedSettings
from ndif.schema.deployment import DeploymentConfig
from ndif.tasks import within
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.replica import (
    HERE,
    alive,
)
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.usefixtures("without_templates"),
]

TASK = "text-generation"
UNTRUSTED = UntrustedSettings(
    sandbox="off",
    protector=True,
    whitelist=None,
    memory_bytes=1 << 30,
    result_bytes=1 << 20,
    max_threads=64,
    adapters="/nowhere",
)

ROOT = Path(__file__).parents[2]

PROGRAM = f"""#!{sys.executable}
# Stands for the interpreter: forks, and starts, processes that import little and say what they are like.
import os, socket, sys
sys.path.append({str(ROOT)!r})
from ndif.runtime.frames import FrameChannel
from ndif.runtime.process.fork_server import OPTION, ForkServer
from tests.host.process_state import answer

del sys.argv[1:3]  # as Python does with -m MODULE
if OPTION in sys.argv:
    if os.environ.get("FORK_SERVER_FAILS"):
        sys.exit(1)
    ForkServer(FrameChannel(socket.socket(fileno=int(sys.argv[1]))), {{"ndif.runtime": answer}}).serve()
else:
    answer(int(sys.argv[1]))
"""


@contextlib.asynccontextmanager
async def some_servers(idle_s: float = 600.0) -> AsyncIterator[ForkServers]:
    servers = ForkServers(idle_s)
    try:
        yield servers
    finally:
        servers.stop()
        for child in CHILDREN:
            child.close()
            await child.process.wait()
        CHILDREN.clear()


CHILDREN: list[Child] = []
"""Processes of the current test."""


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """A runtime whose processes answer questions about themselves."""
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return replace(HERE, interpreter=program)


class Child:
    """A process that answers questions about itself."""

    def __init__(self, process: Process, channel: socket.socket) -> None:
        self.process = process
        self._channel = channel

    async def ask(self, question: str = "state") -> Any:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._channel, f"{question}\n".encode())
        text = b""
        while not text.endswith(b"\n"):
            text += (await loop.sock_recv(self._channel, 1 << 16)) or b"null\n"
        return json.loads(text)

    def close(self) -> None:
        self._channel.close()


async def a_child(
    servers: ForkServers, runtime: Runtime, *, untrusted: bool = False, keep_output: bool = True
) -> Child:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await servers.start(
            runtime, "ndif.runtime", theirs, untrusted=untrusted, keep_output=keep_output
        )
    ours.setblocking(False)
    CHILDREN.append(Child(process, ours))
    return CHILDREN[-1]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def text_of(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


# A child, compared with a started process


@pytest.mark.parametrize("untrusted", [False, True])
@on_loop
async def test_forked_process_matches_started_process(
    untrusted: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with some_servers() as servers:
        started = await a_child(servers, runtime, untrusted=untrusted)
        servers.prepare(runtime, untrusted=untrusted)
        # A child does not inherit the channels of other children.
        others = [await a_child(servers, runtime, untrusted=untrusted) for _ in range(2)]
        forked = await a_child(servers, runtime, untrusted=untrusted)
        fresh, mine = await started.ask(), await forked.ask()
        assert isinstance(forked.process, ForkedProcess)
        assert not isinstance(started.process, ForkedProcess)
        assert parent(started.process.pid) == os.getpid()
        assert parent(parent(forked.process.pid)) == os.getpid()
        assert fresh["random"] != mine["random"]
        randoms = [(await child.ask())["random"] for child in (*others, forked)]
        for kind in fresh["random"]:
            assert len({values[kind] for values in randoms}) == 3, kind
        for state in (fresh, mine):
            del state["random"]
            # The process leads its own session.
            assert state.pop("session") == state.pop("group") == state.pop("pid")
        assert ("HF_TOKEN" in mine["environment"]) is not untrusted
        assert mine["threads"] <= fresh.pop("threads")
        mine.pop("threads")
        assert mine == fresh
        assert mine["limits"]["RLIMIT_NOFILE"] == [soft, hard]
        assert mine["death_signal"] == signal.SIGKILL
        for child in (started, forked, *others):
            child.close()
            assert await child.process.wait() == 0


@pytest.mark.parametrize("untrusted", [False, True])
def test_forked_process_has_imports_one_thread_and_no_cuda(untrusted: bool) -> None:
    """Children have imported all modules of a model process, in one thread and without CUDA."""
    program = (
        "import sys; from tests.host.process_state import answer;"
        "from ndif.runtime.process import fork_server as s; fd, generation = int(sys.argv[1]), sys.argv[2];"
        "s._PROGRAMS = {'ndif.runtime': answer}; s.main(fd, generation, "
        f"untrusted={untrusted})"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), "0.8"], pass_fds=[theirs.fileno()]
        )
    try:
        status, its_status = socket.socketpair()
        channel, its_channel = socket.socketpair()
        request = StartModule("ndif.runtime")
        FrameChannel(ours).send(request, fds=[its_status.fileno(), 2, its_channel.fileno()])
        for end in (its_status, its_channel):
            end.close()
        (pid,) = STATUS.unpack(status.recv(STATUS.size))
        answers = channel.makefile()
        channel.sendall(b"state\nisolation\n")
        state_of_fork = json.loads(answers.readline())
        assert state_of_fork["pid"] == pid
        assert state_of_fork["threads"] == 1
        assert not state_of_fork["cuda"]
        assert {"torch", "transformers", "nnsight"} <= {*state_of_fork["imported"]}
        assert json.loads(answers.readline()) == [untrusted, untrusted]
        answers.close()
        channel.close()
        assert STATUS.unpack(status.recv(STATUS.size)) == (0,)
    finally:
        server.kill()
        server.wait()


@on_loop
async def test_frozen_fork_server_is_abandoned(runtime: Runtime) -> None:
    async with some_servers() as servers:
        servers.prepare(runtime, untrusted=False)
        child = await a_child(servers, runtime)
        server = parent(child.process.pid)
        os.kill(server, signal.SIGSTOP)
        (running,) = servers._servers.values()
        running._frozen_s = 1.0
        with pytest.raises(OSError, match=f"fork server {server} shows no sign of life"):
            await within(a_child(servers, runtime), PATIENCE_S)
        # Its children live on.
        assert (await child.ask())["pid"] == child.process.pid
        assert isinstance((await a_child(servers, runtime)).process, StartedProcess)
    assert not alive(server)
    assert not alive(child.process.pid)


# How children end


@on_loop
async def test_process_end_is_detected_while_its_output_is_held_open(tmp_path: Path) -> None:
    """A process that a block has started may outlive the model process."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nsleep 30 & echo $!; exec sleep 30\n")
    program.chmod(0o755)
    async with some_servers() as servers:
        child = await a_child(servers, replace(HERE, interpreter=program))
        assert child.process.stdout is not None
        holder = int(await child.process.stdout.readline())
        child.process.kill()
        assert await within(child.process.wait(), PATIENCE_S) == -signal.SIGKILL
        assert alive(holder)
        os.kill(holder, signal.SIGKILL)


@on_loop
async def test_exit_status_of_forked_process_is_reported(runtime: Runtime) -> None:
    async with some_servers() as servers:
        servers.prepare(runtime, untrusted=False)
        child = await a_child(servers, runtime)
        assert await child.ask("exit 3") is None
        assert await child.process.wait() == child.process.returncode == 3
        with pytest.raises(ProcessLookupError):
            child.process.kill()
        child = await a_child(servers, runtime)
        child.process.kill()
        assert await child.process.wait() == -signal.SIGKILL


@on_loop
async def test_end_is_reported_after_stopped_fork_server_continues(runtime: Runtime) -> None:
    async with some_servers() as servers:
        servers.prepare(runtime, untrusted=False)
        child = await a_child(servers, runtime)
        server = parent(child.process.pid)
        os.kill(server, signal.SIGSTOP)
        child.process.kill()
        waiting = asyncio.create_task(child.process.wait())
        await eventually(lambda: not alive(child.process.pid))
        os.kill(server, signal.SIGCONT)
        assert await waiting == -signal.SIGKILL


@on_loop
async def test_output_of_forked_process_is_captured_if_requested(runtime: Runtime) -> None:
    async with some_servers() as servers:
        servers.prepare(runtime, untrusted=False)
        child = await a_child(servers, runtime)
        assert child.process.stdout is not None
        await child.ask("print a word")
        assert await child.process.stdout.readline() == b"a word\n"
        child.close()
        assert await child.process.stdout.read() == b""
        silent = await a_child(servers, runtime, keep_output=False)
        assert silent.process.stdout is None
        await silent.ask("print a word")


@on_loop
async def test_children_end_with_killed_fork_server_and_new_server_replaces_it(
    runtime: Runtime,
) -> None:
    async with some_servers() as servers:
        servers.prepare(runtime, untrusted=False)
        child = await a_child(servers, runtime)
        server = parent(child.process.pid)
        os.kill(server, signal.SIGKILL)
        assert await within(child.process.wait(), PATIENCE_S) == -signal.SIGKILL
        assert not alive(child.process.pid)
        another = await a_child(servers, runtime)
        assert isinstance(another.process, ForkedProcess)
        assert parent(another.process.pid) not in (server, os.getpid())


SERVER = """
import asyncio, os, socket, sys
from pathlib import Path
from ndif.host.fork_server import ForkServers
from ndif.host.runtimes import Runtime

async def main():
    servers = ForkServers()
    runtime = Runtime("0.8", "0.8", Path(sys.argv[1]), ())
    servers.prepare(runtime, untrusted=False)
    ours, theirs = socket.socketpair()
    process = await servers.start(runtime, "ndif.runtime", theirs, untrusted=False)
    theirs.close()
    print(process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@on_loop
async def test_killed_host_leaves_no_processes(runtime: Runtime) -> None:
    host = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(runtime.interpreter), stdout=subprocess.PIPE
    )
    assert host.stdout is not None
    pid = int(await host.stdout.readline())
    server = parent(pid)
    host.kill()
    await host.wait()
    await eventually(lambda: not alive(pid) and not alive(server))


# When there is a server


@on_loop
async def test_one_fork_server_per_runtime_and_trust(runtime: Runtime) -> None:
    async with some_servers() as servers:
        for _ in range(3):
            servers.prepare(runtime, untrusted=False)
        trusted = [await a_child(servers, runtime) for _ in range(2)]
        assert len({parent(child.process.pid) for child in trusted}) == 1
        # Without its own fork server, untrusted code does not use the fork server of trusted code.
        other = await a_child(servers, runtime, untrusted=True)
        assert parent(other.process.pid) == os.getpid()
        assert other.process.pid not in children(parent(trusted[0].process.pid))


@on_loop
async def test_process_is_started_if_fork_server_fails(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORK_SERVER_FAILS", "1")
    async with some_servers() as servers:
        servers.prepare(runtime, untrusted=False)
        for _ in range(2):
            child = await a_child(servers, runtime)
            assert not isinstance(child.process, ForkedProcess)
            assert (await child.ask())["pid"] == child.process.pid
            child.close()
            await child.process.wait()
        assert "is not forked" in caplog.text


@on_loop
async def test_unstartable_runtime_raises_error_with_its_path(tmp_path: Path) -> None:
    broken = Runtime("0.8", "0.8.1", tmp_path / "no-python", ())
    async with some_servers() as servers:
        servers.prepare(broken, untrusted=False)
        with pytest.raises(OSError, match="no-python"):
            await a_child(servers, broken)


@on_loop
async def test_idle_fork_server_of_other_runtime_ends(runtime: Runtime, tmp_path: Path) -> None:
    overlay = replace(runtime, path=(tmp_path / "overlay",))
    async with some_servers(idle_s=0.2) as servers:
        servers.prepare(runtime, untrusted=False)
        stays = await a_child(servers, runtime)
        servers.prepare(overlay, untrusted=False)
        child = await a_child(servers, overlay)
        server = parent(child.process.pid)
        await time_passes_async(0.5)
        assert alive(server)
        child.close()
        await child.process.wait()
        await eventually(lambda: not alive(server))
        stays.close()
        await stays.process.wait()
        await time_passes_async(0.5)
        again = await a_child(servers, runtime)
        assert isinstance(again.process, ForkedProcess)


@on_loop
async def test_stopping_ends_fork_servers_and_their_children(runtime: Runtime) -> None:
    async with some_servers() as servers:
        servers.prepare(runtime, untrusted=False)
        child = await a_child(servers, runtime)
        server = parent(child.process.pid)
    assert not alive(server)
    assert await within(child.process.wait(), PATIENCE_S) == -signal.SIGKILL


# Real model processes


def a_model(
    checkpoint: Path, servers: ForkServers, untrusted: UntrustedSettings | None = None
) -> ModelProcess:
    spec = ModelSpec(str(checkpoint), "0.8", task=TASK, device="cpu", untrusted=untrusted)
    return ModelProcess(spec, HERE, SharedWeights(), servers)


async def load(process: ModelProcess) -> int:
    await process.start(PATIENCE_S, lambda loaded, total: None)
    assert isinstance(process._process, ForkedProcess)
    assert process.model.class_name == "GPT2LMHeadModel"
    return process._process.pid


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return text_of(pid, "cmdline")
    return ""


@on_loop
async def test_models_are_measured_and_loaded_in_forked_processes(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Process] = {}
    start = ForkServers.start

    async def noted(
        self: ForkServers, runtime: Runtime, module: str, *args: Any, **kwargs: Any
    ) -> Process:
        started[module] = process = await start(self, runtime, module, *args, **kwargs)
        return process

    monkeypatch.setattr(ForkServers, "start", noted)
    async with some_servers() as servers:
        servers.prepare(HERE, untrusted=False)
        evaluate = Evaluator(fork_servers=servers, untrusted=False)
        config = DeploymentConfig("a/b", str(tiny_gpt2))
        assert (await evaluate(config, HERE)).size_bytes > 0
        assert isinstance(started["ndif.runtime.measure"], ForkedProcess)
        processes = [a_model(tiny_gpt2, servers) for _ in range(2)]
        first, second = [await load(process) for process in processes]
        assert parent(first) == parent(second)
        assert len(children(parent(first))) == 2  # the measuring process has ended
        arguments = command(first).strip("\0").split("\0")
        assert arguments[1:3] == ["-m", "ndif.runtime"]
        assert re.fullmatch(r"\d+", arguments[3])
        await evaluate.stop()
        for process in processes:
            await process.stop()
        assert not alive(first)
        assert not alive(second)


@on_loop
async def test_models_are_lost_with_fork_server_and_can_be_reloaded(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    async with some_servers() as servers:
        servers.prepare(HERE, untrusted=True)
        process = a_model(tiny_gpt2, servers, UNTRUSTED)
        pid = await load(process)
        server = parent(pid)
        for process_id in (pid, server):
            assert "hf_secret" not in text_of(process_id, "environ")
        os.kill(server, signal.SIGKILL)
        await within(process.ended.wait(), PATIENCE_S)
        await process.stop()
        with pytest.raises(ModelProcessError, match="killed by SIGKILL"):
            await process.fork(fresh=False)
        again = a_model(tiny_gpt2, servers, UNTRUSTED)
        assert parent(await load(again)) != server
        await again.stop()
