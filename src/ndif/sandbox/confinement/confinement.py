"""The whole confinement of one process: what it keeps, and in which order the rest is taken."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ndif.sandbox import limits, privileges
from ndif.sandbox.layers import layers, missing

if TYPE_CHECKING:
    from ndif.sandbox.calls import Filter

Mode = Literal["require", "best-effort", "off"]

_SYSTEM = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/dev/urandom",
    # Public certificates: an HTTP client reads them to be made, and one is made to find it is offline.
    "/etc/ssl/certs",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
)
_DRIVER = (
    *(
        "/proc/driver/nvidia",
        "/proc/driver/nvidia-uvm",
        "/proc/driver/nvidia-caps",
        "/proc/devices",
    ),
    *("/sys/bus/pci", "/sys/devices", "/sys/module"),
)
_DRIVER_STARTS = ("/proc/self", "/proc/modules", "/proc/sys/vm/mmap_min_addr")
"""Files that a GPU's driver reads as it starts, and not after."""
_OWN_THREADS = Path("/proc/self/task")
"""Where drivers from 570 on write the names of their threads; refused, cuInit returns 304."""
_DRIVER_VARIABLES = ("CUDA_", "CUBLAS_", "NVIDIA_", "PYTORCH_", "TORCH_")
"""How the names begin of variables that say which GPU is which, and how it computes."""
_CHANNEL, _RULES = 3, 4
_ENV_START, _ENV_END = 47, 48
"""Fields of /proc/PID/stat, from the state on (proc_pid_stat(5))."""


class ConfinementError(RuntimeError):
    """This machine cannot confine a process as it must be."""


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """Files that a process needs which drives GPUs, as another that does so has found them."""

    libraries: tuple[str, ...]
    """Folders of the libraries that the driver has loaded."""
    devices: tuple[str, ...]
    """Device files of the GPUs in use, and of the driver itself."""
    shared_memory: tuple[str, ...]
    """Files that the process shares with the one that holds the weights."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """The confinement of a process that runs untrusted code: made once, entered by each such process.

    Owns the rules of the strict layer, which hold while untrusted code runs. On a GPU a wider layer comes
    before it, built by each process for itself: in it the driver starts, and no byte of a request is read.
    """

    mode: Mode
    memory_bytes: int
    result_bytes: int
    max_threads: int
    readable: tuple[Path, ...]
    """The model's files, beyond the interpreter and its libraries."""
    driver: DriverFiles | None
    """None on CPUs."""
    rules: int | None
    """A descriptor of the files that may be opened; None where this machine cannot tell them apart."""
    calls: Filter | None
    """The system calls that may be made; None where this machine cannot tell them apart, either."""

    @classmethod
    def prepare(
        cls,
        mode: Mode,
        *,
        readable: Iterable[Path],
        memory_bytes: int,
        result_bytes: int,
        max_threads: int,
        driver: DriverFiles | None = None,
    ) -> Confinement:
        """Compile the rules of a confinement; the arguments are its attributes.

        Raises:
            ConfinementError: if this machine cannot confine as `mode` asks.
        """
        verify(mode)
        files = tuple(readable)
        rules = calls = None
        if mode != "off":
            with _allowing_less(mode):
                # Here, because to find libseccomp it runs another program.
                from ndif.sandbox.calls import Filter

                calls = Filter.compile(devices=driver is not None)
            with _allowing_less(mode):
                from ndif.sandbox.files import ruleset

                rules = ruleset(*_strict(files, driver))
        return cls(mode, memory_bytes, result_bytes, max_threads, files, driver, rules, calls)

    def isolate(self, channel: int) -> int:
        """Part this process from what it has from its parent; return where its `channel` is now.

        The channel, and until `enter` the rules, are its only descriptors: the standard streams lead
        nowhere. Of its environment it keeps the driver's variables, until the driver has started.
        """
        if self.mode == "off":
            return channel
        kept = driver_variables() if self.driver is not None else {}
        os.environ.clear()
        _erase_environment()
        os.environ.update(kept)
        os.setsid()
        # As long as /proc can be opened.
        _first_to_die()
        _keep_only(channel, self.rules)
        return _CHANNEL

    def enter(self, start_driver: Callable[[], None] | None = None) -> None:
        """Confine this process for good.

        It must have one thread: what is taken from a thread is taken from those that it starts.

        Args:
            start_driver: Start the driver of a GPU and all that needs more than untrusted code may have.
                What the threads are left with that it starts, see docs/gpu.md.

        Raises:
            ConfinementError: if this machine cannot, and must.
        """
        if self.mode != "off":
            with _allowing_less(self.mode):
                limits.restrict_tasks(self.max_threads)
        if start_driver is None:
            self._limit(self.memory_bytes)
            self._drop_privileges()
        else:
            with self._layer_for_the_driver() as close_files:
                self._drop_privileges()
                close_files()
                start_driver()
            # Not before: the driver sizes memory files as it starts.
            self._limit(None)
        if self.mode == "off":
            return
        os.environ.clear()
        self._keep_files(None if self.rules is None else _RULES)
        if self.calls is not None:
            with _allowing_less(self.mode):
                self.calls.load()

    def _limit(self, memory_bytes: int | None) -> None:
        if self.mode != "off":
            with _allowing_less(self.mode):
                driven = self.driver is not None
                limits.restrict(memory_bytes, self.result_bytes, beside_a_driver=driven)

    def _drop_privileges(self) -> None:
        if self.mode != "off":
            with _allowing_less(self.mode):
                privileges.drop()

    @contextlib.contextmanager
    def _layer_for_the_driver(self) -> Iterator[Callable[[], None]]:
        """Have a first layer of rules, made for this process; the context's value enters it.

        It leaves what the driver needs to start beyond what untrusted code may have. While the context
        lasts, the directory entry of this process's threads is there, which a rule is bound to.
        """
        if self.mode == "off" or self.driver is None:
            yield lambda: None
            return
        threads = os.open(_OWN_THREADS, os.O_PATH | os.O_CLOEXEC)
        try:
            rules: int | None = None
            with _allowing_less(self.mode):
                from ndif.sandbox.files import ruleset

                rules = ruleset(*_starting(self.readable, self.driver), [_OWN_THREADS])
            yield lambda: self._keep_files(rules)
        finally:
            os.close(threads)

    def _keep_files(self, rules: int | None) -> None:
        """Leave this process the files of `rules`, where this machine can tell files apart."""
        if rules is not None:
            with _allowing_less(self.mode):
                from ndif.sandbox.files import restrict

                restrict(rules)

    def permit_file(self) -> None:
        """Let this process write the file that it was handed for its result."""
        if self.mode != "off":
            limits.permit_file()


def driver_variables() -> dict[str, str]:
    """Return the variables of this process that say which GPU is which, and how it computes."""
    return {name: value for name, value in os.environ.items() if name.startswith(_DRIVER_VARIABLES)}


def _strict(readable: Iterable[Path], driver: DriverFiles | None) -> tuple[list[Path], list[Path]]:
    """Return what untrusted code may read, and what it may also write to."""
    reading = [*interpreter(), *map(Path, _SYSTEM), *readable]
    writing = [Path(os.devnull)]
    if driver is not None:
        reading += map(Path, (*_DRIVER, *driver.libraries))
        writing += map(Path, (*driver.devices, *driver.shared_memory))
    return reading, writing


def _starting(readable: Iterable[Path], driver: DriverFiles) -> tuple[list[Path], list[Path]]:
    """Return what the driver of a GPU may read as it starts, and what it may also write to."""
    reading, writing = _strict(readable, driver)
    return [*reading, *map(Path, _DRIVER_STARTS)], writing


@contextlib.contextmanager
def _allowing_less(mode: Mode) -> Iterator[None]:
    """A step that may fail where the operator said so, and nowhere else."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        if mode == "require":
            raise ConfinementError(f"A process could not be confined: {error}") from error


def verify(mode: Mode) -> None:
    """See that this machine has what `mode` asks for.

    Raises:
        ConfinementError: if not, naming what is missing and what to do.
    """
    lacking = missing(layers()) if mode == "require" else []
    if lacking:
        named = "; ".join(f"{layer.name} ({layer.detail})" for layer in lacking)
        raise ConfinementError(
            f"Untrusted code cannot be confined on this machine: it lacks {named}. `ndif doctor` shows "
            "every layer. NDIF_SANDBOX=best-effort runs it with what there is."
        )


def interpreter() -> list[Path]:
    """Where Python, its packages and the libraries they load lie."""
    paths = {Path(path) for path in sys.path if path}
    paths.update(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    # Of a virtual environment both: what it adds, and what it stands on.
    for prefix in (sys.prefix, sys.base_prefix):
        for name in ("stdlib", "platstdlib", "purelib", "platlib"):
            paths.add(Path(sysconfig.get_path(name, vars={"base": prefix, "platbase": prefix})))
    paths.update(folders_of_libraries())
    return sorted(path.resolve() for path in paths if path.exists())


def folders_of_libraries() -> Iterable[Path]:
    """Yield the folder of each library that is loaded: it may load its neighbours later."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.partition("/")[2]
        if ".so" in name:
            yield Path("/", name).parent


def of_checkpoint(folder: Path) -> list[Path]:
    """What a model's folder holds, also where its files are links into a cache."""
    return sorted({folder.resolve(), *(file.resolve() for file in folder.rglob("*"))})


def _erase_environment() -> None:
    """What the kernel put on the stack when this program began stays there when Python forgets it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    ctypes.memset(start, 0, end - start)


def _first_to_die() -> None:
    """Memory that runs out is this process's to give back, not its neighbours'."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def _keep_only(channel: int, rules: int | None) -> None:
    """Two descriptors by their numbers, and standard streams that lead nowhere."""
    # Above both places first, so that neither is written over before it is moved.
    channel = fcntl.fcntl(channel, fcntl.F_DUPFD, _RULES + 1)
    if rules is not None:
        os.dup2(fcntl.fcntl(rules, fcntl.F_DUPFD, _RULES + 1), _RULES, inheritable=False)
    os.dup2(channel, _CHANNEL, inheritable=False)
    os.closerange(_RULES + (rules is not None), os.sysconf("SC_OPEN_MAX"))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
