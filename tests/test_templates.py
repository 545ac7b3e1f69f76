"""Fork servers and probes of the tests: forks of a template that behave like started processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ndif.host.fork_server import ForkServerError, ForkServers, Process
from ndif.host.heartbeat import parent
from ndif.probe.probe import variables_of_client
from ndif.tasks import within
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.replica import HERE, alive
from tests.templates.stand_in import FOR
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = pytest.mark.process


def main(fd: int, question: str) -> None:
    """Run as a child of a fork server: send facts about this process, and wait until the socket closes."""
    from huggingface_hub import constants

    channel = socket.socket(fileno=fd)
    shown = Path("/proc/self/environ").read_bytes().rstrip(b"\0").split(b"\0")
    order = {
        "question": question,
        "home": constants.HF_HOME,
        "endpoint": constants.ENDPOINT,
        "shown": sorted(map(os.fsdecode, shown)),
        "has": sorted(f"{name}={value}" for name, value in os.environ.items()),
        "folder": str(Path.cwd()),
        "server": os.getppid(),
    }
    channel.sendall(json.dumps(order).encode() + b"\n")
    channel.recv(1)


@asynccontextmanager
async def a_child(servers: ForkServers, question: str) -> AsyncIterator[tuple[Process, Any]]:
    """Yield a process that reports facts about itself, and the facts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        servers.prepare(HERE, untrusted=False)
        process = await servers.start(
            HERE, f"{__name__} {question}", theirs, untrusted=False, keep_output=False
        )
        theirs.close()
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        yield process, json.loads(await within(reader.readline(), PATIENCE_S))
        writer.close()


async def template_of(question: str) -> int:
    """Return the template process of a fork server."""
    servers = ForkServers()
    async with a_child(servers, question) as (_, answer):
        template = parent(answer["server"])
    servers.stop()
    return template


@on_loop
async def test_fork_servers_of_one_template_have_their_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for name in ("one", "another"):
        monkeypatch.delenv("PYTEST_CURRENT_TEST")
        monkeypatch.setenv("HF_HOME", str(tmp_path / name))
        monkeypatch.setenv("HF_ENDPOINT", f"http://{name}")
        monkeypatch.setenv("TEST_OF_TEMPLATES", name)
        servers = ForkServers()
        async with a_child(servers, name) as (_, answer):
            answers.append(answer)
            assert answer["question"] == name
            assert answer["home"] == str(tmp_path / name)
            assert answer["endpoint"] == f"http://{name}"
            assert f"TEST_OF_TEMPLATES={name}" in answer["has"]
            assert set(answer["has"]) <= set(answer["shown"])
            assert answer["folder"] == str(Path.cwd())
        servers.stop()
        await eventually(lambda answer=answer: not alive(answer["server"]))
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "again")
    assert answers[0]["server"] != answers[1]["server"]


@on_loop
async def test_fork_server_and_its_children_end_with_stand_in() -> None:
    servers = ForkServers()
    async with a_child(servers, "ends") as (process, answer):
        (running,) = servers._servers.values()
        stand_in = running._process
        assert stand_in.pid != answer["server"]
        assert children(stand_in.pid) == [process.pid]
        stand_in.kill()
        assert await within(process.wait(), PATIENCE_S) < 0
        await eventually(lambda: not alive(answer["server"]))
    servers.stop()


@on_loop
async def test_stand_in_ends_with_fork_server() -> None:
    servers = ForkServers()
    async with a_child(servers, "ends") as (process, answer):
        (running,) = servers._servers.values()
        os.kill(answer["server"], signal.SIGKILL)
        assert await asyncio.to_thread(running._process.wait, PATIENCE_S) == -signal.SIGKILL
        assert await within(process.wait(), PATIENCE_S) < 0
    servers.stop()


@on_loop
async def test_template_survives_stand_in_killed_during_fork() -> None:
    template = await template_of("before")
    servers = ForkServers()
    servers.prepare(HERE, untrusted=False)
    (asking,) = servers._servers.values()
    ours, theirs = socket.socketpair()
    os.kill(template, signal.SIGSTOP)
    with ours, theirs:
        forking = asyncio.create_task(asking.fork(f"{__name__} nothing", theirs, keep_output=False))
        await time_passes_async(1)
        asking._process.kill()
        os.kill(template, signal.SIGCONT)
        with pytest.raises(ForkServerError):
            await within(forking, PATIENCE_S)
    servers.stop()
    assert await template_of("after") == template


@pytest.mark.parametrize("is_fork", [True, False])
def test_forked_probe_behaves_like_started_probe(
    is_fork: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not is_fork:
        request.getfixturevalue("without_templates")
    with socket.create_server(("127.0.0.1", 0)) as hub:
        url = f"http://127.0.0.1:{hub.getsockname()[1]}"
        about = {"repo_id": "test-org/absent", "revision": None, "task": "text-generation"}
        question = {"url": url, "key": "", "cache": str(tmp_path), "timeout_s": PATIENCE_S, **about}
        process = subprocess.Popen(
            [sys.executable, "-m", "ndif.probe.trace"],
            env=variables_of_client(HERE, url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        hub.settimeout(PATIENCE_S)
        asked = hub.accept()[0]  # the probe uses the address that it got after its start
        name = Path(f"/proc/{process.pid}/comm").read_text()
        assert name.startswith(FOR) == is_fork
    asked.close()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert json.loads(output)["kind"] == "error", output
