"""Server and client processes, and measurements of their memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.profiles import drawn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from prepare_model import NAME  # noqa: E402 - an example, not a package

CACHE = ROOT / ".cache"
_RUNTIMES = CACHE / "runtimes"
_OWN = "0.8"
"""The generation that is installed with ndif."""
NDIF = str(Path(sys.executable).with_name("ndif"))
_SAMPLE_S = 0.005


@contextlib.contextmanager
def server(
    folder: Path, environment: dict[str, str], *options: str
) -> Iterator[tuple[str, int, str]]:
    """Run `ndif local start` on the demo model; yield its address, process id and output."""
    process = subprocess.Popen(
        [NDIF, "local", "start", str(folder), "--name", NAME, *options],
        env={**environment, "COLUMNS": "200", "NO_COLOR": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    output = ""
    try:
        for line in process.stderr:
            output += line
            if match := re.search(r"Serving at (http://\S+?)\. ", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                with drawn(process.pid):
                    yield match[1], process.pid, output
                return
        raise RuntimeError(f"the server ended:\n{output}")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


@contextlib.contextmanager
def instant(ready: Path) -> Iterator[str]:
    """Run the instant server; yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.servers.instant", str(ready)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


class Watch:
    """The peak growth of the anonymous memory of each of a server's processes."""

    def __init__(self, pid: int) -> None:
        self.start = {p: anonymous(p) for p in descendants(pid)}
        self.peak = dict(self.start)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(pid,), daemon=True)
        self._thread.start()

    def _sample(self, pid: int) -> None:
        while not self._done.wait(_SAMPLE_S):
            for process in descendants(pid):
                now = anonymous(process)
                self.start.setdefault(process, now)
                self.peak[process] = max(self.peak.get(process, 0), now)

    def stop(self) -> int:
        """Stop sampling; return the largest growth of any process, in bytes."""
        self._done.set()
        self._thread.join()
        return max(self.peak[p] - self.start[p] for p in self.peak)


def descendants(pid: int) -> list[int]:
    """Return `pid` and the ids of all its descendants."""
    pids = [pid]
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pids += descendants(int(child))
    return pids


def anonymous(pid: int) -> int:
    """Return the bytes of a process's anonymous memory."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:",)):
                return int(line.split()[1]) * 1024
    return 0


def resident(pid: int) -> int:
    """Return the bytes of a process's resident memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def held_weights(pid: int, size: int) -> float:
    """Return the copies of `size` bytes of weights in a process tree: shared, plus the largest private."""
    memories, own = set(), 0
    for process in descendants(pid):
        mine, inside = 0, False
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
                words = line.split()
                if not words[0].endswith(":"):
                    inside = "model.safetensors" in line or "memfd:weights" in line
                    if inside:
                        memories.add(words[4])
                elif inside and line.startswith("Private_Dirty"):
                    mine += int(words[1]) * 1024
        own = max(own, mine)
    return len(memories) + own / size


def proportional(pid: int) -> int:
    """Return the proportional set size (PSS), in bytes, of a process and its descendants."""
    total = 0
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) * 1024  # type: ignore[index]
    return total


def older_runtimes(clients: Iterable[str]) -> dict[str, str]:
    """Install the runtimes of these clients; return the variable that names their folder to a server."""
    variables = {"NDIF_RUNTIMES_DIR": str(_RUNTIMES)}
    for generation in {*map(_generation, clients)} - {_OWN}:
        if not (_RUNTIMES / generation).is_dir():
            command = [NDIF, "runtime", "add", generation]
            subprocess.run(command, check=True, env={**os.environ, **variables})
    return variables


def _generation(nnsight: str) -> str:
    return ".".join(nnsight.split(".")[:2])


def _overlay(nnsight: str) -> dict[str, str]:
    """Return the variable that gives a client this nnsight; install a release if necessary."""
    if nnsight == _OWN:
        return {}
    folders = [_RUNTIMES / _generation(nnsight)]
    if nnsight != _generation(nnsight):
        release = CACHE / "clients" / nnsight
        if not release.is_dir():
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
            subprocess.run([*pip, "--target", release, f"nnsight=={nnsight}"], check=True)
        folders.insert(0, release)
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def client(
    program: str, nnsight: str, url: str, *arguments: str, runs: str = NAME
) -> subprocess.CompletedProcess[str]:
    """Run a program of `bench.clients` with one nnsight version; its only configuration is the server."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"{url}/hub",
        "HF_HOME": str(CACHE / "client"),
        "NDIF_HOST": url,
        **_overlay(nnsight),
    }
    command = [sys.executable, "-m", f"bench.clients.{program}", runs, *arguments]
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"bench.clients.{program} ended:\n{process.stdout}{process.stderr}")
    return process


def cpu_s(pid: int) -> float:
    """Return the core-seconds of a process and its descendants, including ended ones."""
    ticks = 0
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
