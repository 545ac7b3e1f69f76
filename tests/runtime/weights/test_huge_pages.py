"""Weights in shared memory: the same bytes at the same addresses, in memory that is sealed."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import mmap
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndif.host.model_process import ModelProcess
from ndif.host.runtimes import Runtime
from ndif.host.shared_weights import SharedWeights
from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import Filled, SharedMemory, ShareWeights
from ndif.runtime.process.procfs import mappings
from ndif.runtime.spec import ModelSpec, UntrustedSettings
from ndif.runtime.weights.huge_pages import share, weights_of
from tests.runtime.apart import apart
from tests.tiny_models import make_gpt2, make_t5

pytestmark = pytest.mark.process

SIZE = (5 << 20) + 3 * mmap.PAGESIZE
PAGE = 300
"""A page that the process writes to before its weights are shared."""


class Host:
    """The other end of a channel. It provides one memory file for each name and records the reports."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = FrameChannel(theirs)
        self.memory: dict[str, int] = {}
        self.usable: dict[str, bool] = {}
        self.generous = True
        threading.Thread(target=self._serve, args=(FrameChannel(ours),), daemon=True).start()

    def _serve(self, channel: FrameChannel) -> None:
        while True:
            message, _, _ = channel.receive()
            if isinstance(message, Filled):
                self.usable[message.name] = message.usable
                continue
            assert isinstance(message, ShareWeights)
            name = message.name
            answer = SharedMemory(self.usable.get(name, False))
            if not self.generous:
                channel.send(answer)
                continue
            if name not in self.memory:
                self.memory[name] = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
            channel.send(answer, fds=[self.memory[name]])


def mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(
            opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )


def address(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def path(area: mmap.mmap) -> str:
    at = address(area)
    return next(m.path for m in mappings() if m.start <= at < m.end)


def digest(area: mmap.mmap) -> str:
    return hashlib.sha256(memoryview(area)).hexdigest()


def refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except PermissionError:
        return True
    return False


# The measurements, each in a separate process.


def sharing(folder: str) -> dict[str, Any]:
    file = Path(folder, "model.safetensors")
    host = Host()
    first = mapped(file)
    truth = digest(first)
    first[PAGE * mmap.PAGESIZE] ^= 255
    before = digest(first), address(first)
    share(weights_of(Path(folder)), host.channel)
    after = digest(first), address(first)
    (fd,) = host.memory.values()
    huge = Path("/proc/self/smaps").read_text().partition("/memfd:weights")[2]
    match = re.search(r"ShmemPmdMapped:\s+(\d+)", huge)
    report = {
        "own": before[0] != truth,
        "same": before == after,
        "moved": path(first).startswith("/memfd:weights"),
        "huge": int(match[1]) << 10 if match else 0,
        "sealed": refused(lambda: os.pwrite(fd, b"x", 0)),
        "closed": refused_to_shrink(fd),
    }
    # A second mapping stands for a second process, which finds the memory filled.
    second = mapped(file)
    others = [m for m in weights_of(Path(folder)) if m.start == address(second)]
    aligned = address(second) % (2 << 20) == address(first) % (2 << 20)
    share(others, host.channel)
    report["second"] = digest(second) == truth
    report["one memory"] = len(host.memory) == (1 if aligned else 2)
    # A write to one mapping changes neither the other mapping nor the file.
    second[5] ^= 255
    report["private"] = (
        digest(first) == before[0] and hashlib.sha256(file.read_bytes()).hexdigest() == truth
    )
    return report


def refused_to_shrink(fd: int) -> bool:
    return refused(lambda: os.ftruncate(fd, 0))


def staying(folder: str) -> dict[str, Any]:
    """Measure weights that stay in place: the host has no memory, or their file was replaced."""
    file = Path(folder, "model.safetensors")
    host = Host()
    host.generous = False
    area = mapped(file)
    truth = digest(area)
    share(weights_of(Path(folder)), host.channel)
    report = {"refused": path(area) == str(file) and digest(area) == truth}
    host.generous = True
    weights = weights_of(Path(folder))
    file.rename(file.with_suffix(".old"))
    file.write_bytes(bytes(SIZE))
    share(weights, host.channel)
    report["replaced"] = digest(area) == truth and not host.memory
    return report


def small(folder: str) -> dict[str, Any]:
    """Measure weights that are smaller than a huge page."""
    file = Path(folder, "model.safetensors")
    file.write_bytes(os.urandom(64 << 10))
    host = Host()
    area = mapped(file)
    area[7] ^= 255
    before = digest(area)
    share(weights_of(Path(folder)), host.channel)
    share([], host.channel)
    return {"same": digest(area) == before, "stayed": path(area) == str(file)}


def measured(name: str, folder: Path) -> Any:
    return apart("tests.runtime.weights.test_huge_pages", name, folder)


# The tests.


def test_shared_weights_keep_bytes_and_addresses(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(os.urandom(SIZE))
    values = measured("sharing", tmp_path)
    assert values.pop("huge") >= 2 << 20
    assert all(values.values()), values


def test_weights_stay_in_file_without_memory_or_after_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(os.urandom(SIZE))
    values = measured("staying", tmp_path)
    assert all(values.values()), values


def test_small_weights_stay_in_their_file(tmp_path: Path) -> None:
    values = measured("small", tmp_path)
    assert all(values.values()), values


def backing(pid: int) -> set[int]:
    """Return the inodes of the files from which a process maps its weights."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {
        int(line.split()[4]) for line in lines if re.search(r"memfd:weights|safetensors$", line)
    }


def memories() -> int:
    """Return how many descriptors of shared weights this process has."""
    links = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum("memfd:weights" in str(link) for link in links)


def test_processes_of_two_generations_share_one_memory(tmp_path: Path, runtimes: Path) -> None:
    folder = make_gpt2(tmp_path / "model", width=512)
    before = memories()

    async def run() -> None:
        weights = SharedWeights()
        overlay = Runtime("0.7", "0.7", Path(sys.executable), (runtimes / "0.7",))
        processes = []
        for runtime in (Runtime("0.8", "0.8", Path(sys.executable), ()), overlay):
            spec = ModelSpec(str(folder), runtime.generation, task="text-generation")
            processes.append(ModelProcess(spec, runtime, weights))
            await processes[-1].start(60, lambda loaded, total: None)
        assert memories() == before + 1
        pids = [process._process.pid for process in processes if process._process]
        files = [backing(pid) for pid in pids]
        assert len(files[0]) == 1
        assert files[0] == files[1]
        # One runner of each process maps them, too.
        for process in processes:
            runner = await process.fork(fresh=False)
            await runner.ready()
            assert runner.pid is not None
            assert backing(runner.pid) == files[0]
        await processes[0].stop()
        assert backing(pids[1]) == files[0]
        await processes[1].stop()

    asyncio.run(run())
    assert memories() == before


def test_runner_maps_all_weights_before_its_request(tmp_path: Path) -> None:
    """This holds even without a warm-up request; a request's memory is measured from this point."""
    folder = make_t5(tmp_path / "model", width=2048)
    size = (folder / "model.safetensors").stat().st_size
    untrusted = UntrustedSettings(
        "require", False, None, 1 << 30, 1 << 20, 64, str(tmp_path / "adapters")
    )

    async def run() -> int:
        runtime = Runtime("0.8", "0.8", Path(sys.executable), ())
        spec = ModelSpec(str(folder), "0.8", task="feature-extraction", untrusted=untrusted)
        process = ModelProcess(spec, runtime, SharedWeights())
        await process.start(60, lambda loaded, total: None)
        runner = await process.fork(fresh=True)
        await runner.ready()
        status = status_of(runner.pid)
        await process.stop()
        return int(re.findall(r"RssShmem:\s+(\d+)", status)[0]) << 10

    assert size > 4 << 20
    assert asyncio.run(run()) >= size // (2 << 20) * (2 << 20)


def status_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/status").read_text()


if __name__ == "__main__":
    PROGRAMS: dict[str, Callable[[str], dict[str, Any]]] = {
        run.__name__: run for run in (sharing, staying, small)
    }
    print(json.dumps(PROGRAMS[sys.argv[1]](sys.argv[2])))
