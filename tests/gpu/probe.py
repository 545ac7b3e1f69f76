"""Probe which layer of the confinement stops CUDA, and the cost of sharing tensors with another process.

Usage: python -m tests.gpu.probe [--json PATH] [--pretend]. Prints the machine's facts first. Then an owner
process shares tensors, and forks of this process enter some layers of the confinement, start CUDA, map the
tensors and multiply a matrix. A row shows the layers and the outcome. `--pretend` does the same without a
card: a stand-in opens the files that libcuda opens.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import pickle
import platform
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.multiprocessing.reductions import reduce_tensor

from ndif.sandbox.confinement import landlock as files
from ndif.sandbox.confinement import limits
from ndif.sandbox.confinement.confinement import Confinement, DriverFiles, interpreter_paths
from ndif.sandbox.confinement.layers import detect_layers, missing_layers
from ndif.sandbox.confinement.limits import drop_privileges
from ndif.sandbox.confinement.seccomp import Filter
from tests.gpu.recording import write_json

PATIENCE_S = 30.0
"""Seconds after which a fork that has not answered is killed."""
SHARED_MEMORY = Path("/dev/shm")
_ANSWER_BYTES = 1 << 16
_PR_SET_NO_NEW_PRIVS = 38
_PLACE, _STEP = 5, 1
"""The index of the element that is checked, and its increase from one tensor to the next."""

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


class Driver(Protocol):
    """The interface to CUDA, or to a stand-in."""

    device: str

    def start(self) -> None:
        """Start CUDA in this process."""

    def card(self) -> str:
        """Return the identity of the device that this process computes on."""

    def free_bytes(self) -> int:
        """Return the free memory of the device."""

    def export(self, tensor: torch.Tensor, *, events: bool) -> Handle:
        """Return a handle to `tensor` for another process, with or without an interprocess event."""

    def libraries(self) -> list[str]:
        """Return the files of the driver that this process has mapped."""


class Cuda:
    """CUDA itself, through torch."""

    device = "cuda"

    def start(self) -> None:
        """Start CUDA in this process."""
        torch.cuda.init()
        torch.zeros(1, device=self.device)
        torch.cuda.synchronize()

    def card(self) -> str:
        """Return the device's UUID."""
        return str(torch.cuda.get_device_properties(0).uuid)

    def free_bytes(self) -> int:
        """Return the free memory of the device."""
        return torch.cuda.mem_get_info()[0]

    def export(self, tensor: torch.Tensor, *, events: bool) -> Handle:
        """Share by CUDA IPC; the last argument of the handle says whether to wait for its event."""
        function, arguments = reduce_tensor(tensor)
        torch.cuda.synchronize()
        return function, arguments if events else (*arguments[:-1], False)

    def libraries(self) -> list[str]:
        """Return the libcuda and libnvidia files in /proc/self/maps."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = {line.split(None, 5)[5].strip() for line in lines if "/" in line}
        return sorted(path for path in mapped if "libcuda" in path or "libnvidia" in path)


class Pretend:
    """A stand-in on the CPU that needs the same files as libcuda."""

    device = "cpu"

    def __init__(self, folder: Path) -> None:
        self._library = folder / "libcuda.so"
        self._library.write_bytes(b"a library in a folder of its own")
        self._mark = folder.name

    def start(self) -> None:
        """Read a library, name another thread through /proc, and size a memory file."""
        self._library.read_bytes()
        named = threading.Event()
        thread = threading.Thread(target=named.wait)
        thread.start()
        # The C library writes to /proc/self/task/TID/comm.
        problem = ctypes.CDLL(None).pthread_setname_np(
            ctypes.c_ulong(thread.ident or 0), b"pretend"
        )
        named.set()
        thread.join()
        if problem:
            raise OSError(problem, f"naming a thread: {os.strerror(problem)}")
        fd = os.memfd_create("pretend")
        os.ftruncate(fd, 1 << 16)
        os.close(fd)

    def card(self) -> str:
        """Return the card that the environment names."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "the first")

    def free_bytes(self) -> int:
        """Return 0: the stand-in takes no device memory."""
        return 0

    def export(self, tensor: torch.Tensor, *, events: bool) -> Handle:
        """Share a file in shared memory, and a second one if `events` is true."""
        number = int(tensor[_PLACE])
        memory = SHARED_MEMORY / f"torch_{self._mark}_{number}"
        memory.write_bytes(tensor.numpy().tobytes())
        event = SHARED_MEMORY / f"cuda.shm.{self._mark}"
        event.touch()
        return _open_pretended, (str(memory), tensor.numel(), str(event) if events else None)

    def libraries(self) -> list[str]:
        """Return the stand-in's library."""
        return [str(self._library)]

    def clean(self) -> None:
        """Remove the owner's files in shared memory."""
        for path in SHARED_MEMORY.glob(f"*{self._mark}*"):
            path.unlink()


def _open_pretended(memory: str, count: int, event: str | None) -> torch.Tensor:
    if event is not None:
        os.close(os.open(event, os.O_RDWR))
    return torch.from_file(memory, shared=True, size=count, dtype=torch.int32)


# Processes.


def in_fork(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a fork, or the error that ended it as text."""
    # Use memory instead of a pipe: a fork that isolates itself closes its descriptors.
    answer = mmap.mmap(-1, _ANSWER_BYTES)
    pid = os.fork()
    if pid == 0:
        try:
            result = work()
        except BaseException as error:
            lines = str(error).splitlines() or [""]
            result = f"{type(error).__name__}: {lines[0][:200]}"
        answer.write(json.dumps(result).encode())
        os._exit(0)
    process = os.pidfd_open(pid)
    in_time = select.select([process], [], [], PATIENCE_S)[0]
    os.close(process)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not in_time:
        return f"no answer within {PATIENCE_S:g} s"
    text = answer[:].rstrip(b"\0")
    return json.loads(text) if text else f"ended ({os.waitstatus_to_exitcode(status)})"


@dataclass(frozen=True)
class Owned:
    """The description of the tensors that an owner shares."""

    handles: list[Handle]
    card: str
    libraries: list[str]
    start_s: float
    free_bytes: int

    @property
    def folders(self) -> list[Path]:
        """The folders of the driver's libraries."""
        return sorted({Path(library).parent for library in self.libraries})

    @property
    def counters(self) -> list[Path]:
        """The shared memory files in which torch counts the users of a tensor."""
        return sorted(SHARED_MEMORY.glob("torch_*"))


@contextlib.contextmanager
def owner(driver: Driver, *, events: bool, tensors: int, numbers: int) -> Iterator[Owned]:
    """A process that starts the driver and shares `tensors` of `numbers` int32 each.

    Raises:
        RuntimeError: if the process ends before it has shared the tensors.
    """
    read, write = os.pipe()
    stop_read, stop_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(stop_write)
            began = time.perf_counter()
            driver.start()
            start_s = time.perf_counter() - began
            held = [
                torch.arange(numbers, device=driver.device, dtype=torch.int32) + number * _STEP
                for number in range(tensors)
            ]
            handles = [driver.export(tensor, events=events) for tensor in held]
            description = (handles, driver.card(), driver.libraries(), start_s, driver.free_bytes())
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(description, pipe)
            os.read(stop_read, 1)
        except BaseException as error:
            print(f"the owner failed: {error}", flush=True)
        finally:
            os._exit(0)
    os.close(write)
    os.close(stop_read)
    try:
        with os.fdopen(read, "rb") as pipe:
            content = pipe.read()
        if not content:
            raise RuntimeError("the process that was to share tensors ended")
        yield Owned(*pickle.loads(content))
    finally:
        os.close(stop_write)
        os.waitpid(pid, 0)


# Layers.

GRANTS = (
    "driver libraries",
    "driver facts",
    "devices",
    "thread names",
    "own facts",
    "counters",
    "event files",
)
"""Groups of files that a fork may open in addition to the interpreter's files."""

_SYSTEM = ("/etc/ld.so.cache", "/etc/localtime", "/proc/cpuinfo", "/proc/meminfo", "/dev/urandom")
_FACTS = ("/proc/driver", "/proc/devices", "/proc/modules", "/sys")


_OWN_THREADS = "/proc/self/task"


def grant(name: str, owned: Owned) -> tuple[list[Path], list[Path]]:
    """Return a group's readable files and its writable files. Call it in the fork."""
    match name:
        case "driver libraries":
            return owned.folders, []
        case "driver facts":
            return [Path(path) for path in _FACTS], []
        case "devices":
            return [], [*Path("/dev").glob("nvidia*")]
        case "thread names":
            return [], [Path(_OWN_THREADS)]
        case "own facts":
            return [Path("/proc/self"), Path("/proc/sys/vm/mmap_min_addr")], []
        case "counters":
            return [], owned.counters
        case _:
            return [], [*SHARED_MEMORY.glob("cuda.shm*")]


@dataclass(frozen=True)
class Attempt:
    """The layers that a fork enters before and after it starts the driver."""

    name: str
    layers: frozenset[str] = frozenset()
    grants: tuple[str, ...] = GRANTS
    read_anything: bool = False
    write_anything: bool = False
    calls: bool = False
    """Filter system calls once the driver has started."""


ATTEMPTS = (
    Attempt("nothing"),
    Attempt("environment cleared", frozenset({"environment"})),
    Attempt("limits before the start", frozenset({"limits"})),
    Attempt("privileges dropped", frozenset({"privileges"})),
    Attempt("system calls, after the start", calls=True),
    Attempt("files", frozenset({"files"})),
    *(
        Attempt(f"files, without {left_out}", frozenset({"files"}), tuple(set(GRANTS) - {left_out}))
        for left_out in GRANTS
    ),
    Attempt("files, reading anything", frozenset({"files"}), read_anything=True),
    Attempt("files, writing anything", frozenset({"files"}), write_anything=True),
    Attempt("files, privileges, system calls", frozenset({"files", "privileges"}), calls=True),
)
RUNNER = "as a runner"
"""The row for the confinement that the server uses."""


def enter(attempt: Attempt, owned: Owned) -> None:
    """Enter the layers that come before the driver starts."""
    if "environment" in attempt.layers:
        os.environ.clear()
    if "limits" in attempt.layers:
        limits.apply_limits(None, 1 << 20)
    if "privileges" in attempt.layers:
        drop_privileges()
    if "files" in attempt.layers:
        reading, writing = [*interpreter_paths(), *map(Path, _SYSTEM)], [Path(os.devnull)]
        for name in attempt.grants:
            read, write = grant(name, owned)
            reading += read
            writing += write
        reading += [Path("/")] * attempt.read_anything
        writing += [Path("/")] * attempt.write_anything
        # A driver truncates the files of its threads' names when it opens them.
        # A rule holds while its folder is open.
        os.open(_OWN_THREADS, os.O_PATH | os.O_CLOEXEC)
        truncating = [path for path in writing if path in (Path("/"), Path(_OWN_THREADS))]
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        files.restrict_self(files.create_ruleset(reading, writing, truncating))


def start_and_map(driver: Driver, owned: Owned, then: Callable[[], None]) -> dict[str, Any]:
    """Start the driver, map the owner's tensors, do `then`, and compute."""
    began = time.perf_counter()
    driver.start()
    started = time.perf_counter()
    tensors = [function(*arguments) for function, arguments in owned.handles]
    right = all(int(t[_PLACE]) == _PLACE + n * _STEP for n, t in enumerate(tensors))
    mapped = time.perf_counter()
    then()
    computed = compute(driver)
    return {
        "ok": right and computed,
        "same_card": driver.card() == owned.card,
        "start_s": round(started - began, 3),
        "map_s": round(mapped - started, 3),
        "compute_s": round(time.perf_counter() - mapped, 3),
        "taken_mib": (owned.free_bytes - driver.free_bytes()) >> 20,
    }


def compute(driver: Driver) -> bool:
    """Multiply a matrix; return True if the product is a number."""
    matrix = torch.randn(512, 512, device=driver.device)
    return bool((matrix @ matrix).sum().isfinite().item())


def attempt_in_fork(attempt: Attempt, driver: Driver, owned: Owned) -> Any:
    """Return the outcome of one attempt."""
    # Compile before the fork: to find libseccomp, it runs another program.
    calls = Filter.compile(devices=True) if attempt.calls else None

    def work() -> dict[str, Any]:
        enter(attempt, owned)
        return start_and_map(driver, owned, calls.load if calls else lambda: None)

    return in_fork(work)


def runner_in_fork(driver: Driver, owned: Owned) -> Any:
    """Return the outcome of the server's own confinement, in the server's order of steps."""
    confinement = Confinement.prepare(
        "best-effort" if missing_layers(detect_layers()) else "require",
        readable=(),
        memory_bytes=1 << 30,
        result_bytes=1 << 20,
        max_threads=256,
        driver=DriverFiles(
            libraries=tuple(map(str, owned.folders)),
            devices=tuple(map(str, Path("/dev").glob("nvidia*"))),
            shared_memory=tuple(map(str, owned.counters)),
        ),
    )

    def work() -> dict[str, Any]:
        confinement.detach(os.open(os.devnull, os.O_RDWR))
        outcome: dict[str, Any] = {}
        confinement.apply(lambda: outcome.update(start_and_map(driver, owned, lambda: None)))
        # Compute again once all layers are entered.
        return {**outcome, "ok": outcome["ok"] and compute(driver)}

    return in_fork(work)


# The report.


@dataclass
class Report:
    """All findings of the probe."""

    facts: dict[str, Any]
    rows: dict[str, Any] = field(default_factory=dict)
    """The outcome of each attempt: figures, or an error."""
    absent: str = ""
    """The reason why nothing was probed."""

    @property
    def failed(self) -> bool:
        """Return True if there is a card, but the server's confinement cannot use it."""
        wanted = [self.rows.get(name) for name in ("nothing, without events", RUNNER)]
        return not self.absent and not all(isinstance(row, dict) and row["ok"] for row in wanted)

    def table(self) -> list[tuple[str, str, str]]:
        """Return the name, outcome and detail of each row."""
        shown = [(name, "", str(value)) for name, value in self.facts.items()]
        for name, row in self.rows.items():
            if isinstance(row, dict):
                card = "" if row["same_card"] else "another card; "
                detail = (
                    f"{card}start {row['start_s']} s, map {row['map_s']} s, "
                    f"compute {row['compute_s']} s, {row['taken_mib']} MiB"
                )
                shown.append((name, "passed" if row["ok"] else "wrong values", detail))
            else:
                shown.append((name, "failed", str(row)))
        return shown


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return f"? ({error.strerror})"


def facts() -> dict[str, Any]:
    """Return facts about this machine, without starting CUDA."""
    return {
        "kernel": platform.release(),
        "LSMs": _read("/sys/kernel/security/lsm"),
        "Landlock ABI": files.abi(),
        **{
            layer.name: "yes" if layer.present else "no: " + layer.detail
            for layer in detect_layers()
        },
        "driver": _read("/proc/driver/nvidia/version").partition("\n")[0],
        "devices": sorted(str(path) for path in Path("/dev").glob("nvidia*")),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "Python": platform.python_version(),
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH"),
        **{
            name: value
            for name, value in os.environ.items()
            if name.startswith(("CUDA_", "NVIDIA_", "PYTORCH_"))
        },
    }


def cards() -> list[str]:
    """Return the cards that torch finds in a fork: this process must never start CUDA."""

    def work() -> list[str]:
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [f"{card.name}, {card.total_memory >> 20} MiB, {card.uuid}" for card in devices]

    names = in_fork(work)
    return names if isinstance(names, list) else []


def probe(
    driver: Driver,
    attempts: Sequence[Attempt],
    *,
    tensors: int,
    numbers: int,
    on_attempt: Callable[[Report], None],
) -> Report:
    """Make every attempt with and without events in the handles; call `on_attempt` after each."""
    report = Report(facts())
    on_attempt(report)
    for events in (False, True):
        kind = "with events" if events else "without events"
        try:
            with owner(driver, events=events, tensors=tensors, numbers=numbers) as owned:
                report.facts["driver libraries"] = owned.libraries
                report.facts[f"CUDA start of an owner, {kind}"] = f"{owned.start_s:.2f} s"
                for attempt in attempts:
                    report.rows[f"{attempt.name}, {kind}"] = attempt_in_fork(attempt, driver, owned)
                    on_attempt(report)
                # The server's handles have no events.
                if not events:
                    report.rows[RUNNER] = runner_in_fork(driver, owned)
                    on_attempt(report)
        except RuntimeError as error:
            report.rows[f"an owner, {kind}"] = str(error)
    return report


def absence() -> str:
    """Return the reason why there is no card to probe; empty if there is one.

    Raises:
        SystemExit: if there is a card that torch cannot use.
    """
    if cards():
        return ""
    if devices := sorted(Path("/dev").glob("nvidia[0-9]*")):
        raise SystemExit(
            f"There is {devices[0]}, but torch {torch.__version__} finds no CUDA device."
        )
    return (
        "There is no GPU on this machine: its tests are collected and skipped, nothing is measured."
    )


def main() -> None:
    """Probe, print and write the report; exit 1 if the server's own confinement stops CUDA."""
    parser = argparse.ArgumentParser(description="Probe which layer of the confinement stops CUDA.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pretend", action="store_true", help="use a stand-in for CUDA")
    parser.add_argument("--only", help="try nothing but this attempt")
    parser.add_argument("--tensors", type=int, default=4, help="how many tensors to share")
    parser.add_argument("--numbers", type=int, default=1 << 16, help="the int32s of each")
    arguments = parser.parse_args()
    attempts = [a for a in ATTEMPTS if arguments.only in (None, a.name)]
    size = {"tensors": arguments.tensors, "numbers": arguments.numbers}

    def write(report: Report) -> None:
        if arguments.json:
            write_json(arguments.json, {**asdict(report), "table": report.table()})

    if arguments.pretend:
        with tempfile.TemporaryDirectory(prefix="pretend-") as folder:
            driver = Pretend(Path(folder))
            try:
                report = probe(driver, attempts, **size, on_attempt=write)
            finally:
                driver.clean()
    elif absent := absence():
        report = Report(facts(), absent=absent)
    else:
        report = probe(Cuda(), attempts, **size, on_attempt=write)
        report.facts["cards"] = cards()
    write(report)
    table = Table(title="What CUDA needs of the confinement")
    for heading in ("layers", "outcome", "detail"):
        table.add_column(heading, overflow="fold")
    for row in report.table():
        table.add_row(*map(escape, row))
    console = Console(width=160)
    console.print(table)
    if report.absent:
        console.print(report.absent)
    if report.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
