"""`make bench`: measure, compare each figure with its limit, print a table, write JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from prepare_model import NAME, prepare  # noqa: E402 - an example, not a package

CACHE = ROOT / ".cache"
NDIF = str(Path(sys.executable).with_name("ndif"))
MB = 1 << 20
_SAMPLE_S = 0.005


@dataclass
class Figure:
    """One measured number beside its limit."""

    name: str
    value: float
    limit: float
    unit: str
    at_most: bool = True
    how: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@contextlib.contextmanager
def server(folder: Path, environment: dict[str, str]) -> Iterator[tuple[str, int, str]]:
    """`ndif local start` on the demo model: its address, process id and what it said."""
    process = subprocess.Popen(
        [NDIF, "local", "start", str(folder), "--name", NAME],
        env={**environment, "COLUMNS": "200", "NO_COLOR": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if found := re.search(r"Serving at (http://\S+?)\. ", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield found[1], process.pid, said
                return
        raise RuntimeError(f"the server ended:\n{said}")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


@contextlib.contextmanager
def instant(ready: Path) -> Iterator[str]:
    """The instant server's address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.instant", str(ready)],
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
    """The most anonymous memory that each of a server's processes held, above where it began."""

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
        """The largest growth of any process, in bytes."""
        self._done.set()
        self._thread.join()
        return max(self.peak[p] - self.start[p] for p in self.peak)


def descendants(pid: int) -> list[int]:
    """`pid` and every process below it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += descendants(int(child))
    return found


def anonymous(pid: int) -> int:
    """Bytes of memory that belong to no file."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:",)):
                return int(line.split()[1]) * 1024
    return 0


def resident(pid: int) -> int:
    """Bytes of memory in all."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def weights_of_its_own(pid: int) -> int:
    """Bytes of the weights' file that the process with the most of them shares with no other."""
    most = 0
    for process in descendants(pid):
        own, inside = 0, False
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
                if not line.split()[0].endswith(":"):
                    inside = line.endswith("model.safetensors")
                elif inside and line.startswith("Private_"):
                    own += int(line.split()[1]) * 1024
        most = max(most, own)
    return most


def client(generation: str, folder: Path, url: str, floor: str, ready: Path) -> dict[str, object]:
    """What one generation's client measured."""
    overlay = {} if generation == "0.8" else {"PYTHONPATH": str(CACHE / "runtimes" / generation)}
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"{url}/hub",
        "HF_HOME": str(CACHE / "client"),
        "NDIF_HOST": url,
        **overlay,
    }
    script = str(Path(__file__).with_name("client.py"))
    command = [sys.executable, script, NAME, str(folder), url, floor, str(ready)]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    report: dict[str, object] = json.loads(out.stdout.splitlines()[-1])
    return report


def help_seconds() -> float:
    """How long `ndif --help` takes, the median of seven."""
    took = []
    for _ in range(7):
        began = time.perf_counter()
        subprocess.run([NDIF, "--help"], check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure() -> tuple[list[Figure], dict[str, object]]:
    """Every figure, and the raw numbers behind them."""
    folder = prepare(CACHE / "smollm2-135m")
    environment = {**os.environ, "NDIF_RUNTIMES_DIR": str(CACHE / "runtimes")}
    if not (CACHE / "runtimes" / "0.7").is_dir():
        subprocess.run([NDIF, "runtime", "add", "0.7"], check=True, env=environment)
    figures = [Figure("ndif --help", help_seconds(), 0.4, "s", how="median of 7")]
    raw: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch, server(folder, environment) as (url, pid, said):
        ready = Path(scratch)
        figures.append(
            Figure(
                "idle server without a model", resident(pid) / MB, 120, "MB", how="control plane"
            )
        )
        after = re.search(r"ready ([\d.]+) s later", said)
        assert after
        figures.append(Figure("ready after the weights are loaded", float(after[1]), 3, "s"))
        for generation, limit_ms in (("0.8", 8.0), ("0.7", 12.0)):
            with instant(ready) as floor:
                watch = Watch(pid)
                report = client(generation, folder, url, floor, ready)
                growth = watch.stop()
            raw[generation] = report
            small = report["small"]
            share = report["share"] * 1e3
            how = (
                f"remote {small['server'] * 1e3:.1f} - in process {small['local'] * 1e3:.1f} "
                f"- client floor {small['instant'] * 1e3:.1f} ms"
            )
            name = f"server's share of a small trace, {generation}"
            figures.append(Figure(name, share, limit_ms, "ms", how=how))
            for size in (64, 256):
                large = report[f"large-{size}"]
                ratio = large["instant"] / large["server"]
                how = (
                    f"{size / large['server']:.0f} MB/s beside {size / large['instant']:.0f}; "
                    f"stored {large['stored'] / MB:.0f} MB"
                )
                name = f"{size} MB bfloat16, {generation}: rate / instant"
                figures.append(Figure(name, ratio, 0.6, "x", at_most=False, how=how))
            if generation != "0.8":
                own = weights_of_its_own(pid) / (folder / "model.safetensors").stat().st_size
                how = (
                    "the part of the weights that a process of two generations shares with no other"
                )
                figures.append(Figure("weights that are not shared", own, 0.1, "x", how=how))
            name = f"copies of a 256 MB result in one process, {generation}"
            how = "most anonymous memory that a process gained; the values themselves are one"
            figures.append(Figure(name, growth / (256 * MB), 2.0, "x", how=how))
    return figures, raw


def main() -> None:
    """Measure, show, write; fail where a limit does not hold."""
    figures, raw = measure()
    table = Table(title="ndif")
    for heading in ("figure", "measured", "limit", "", "how"):
        table.add_column(heading, overflow="fold")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.value:.2f} {figure.unit}",
            f"{'≤' if figure.at_most else '≥'} {figure.limit:g} {figure.unit}",
            "holds" if figure.holds else "[red]does not hold[/]",
            figure.how,
        )
    Console().print(table)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    report = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "figures": [{**asdict(figure), "holds": figure.holds} for figure in figures],
        "raw": raw,
    }
    (results / "latest.json").write_text(json.dumps(report, indent=1) + "\n")
    if not all(figure.holds for figure in figures):
        raise SystemExit(1)


main()
