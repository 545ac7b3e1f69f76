"""The whole confinement of one process: what it keeps, and in which order the rest is taken."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
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
_DRIVER = ("/proc/driver/nvidia", "/proc/devices", "/sys/bus/pci", "/sys/devices", "/sys/module")
_DEVICES = "nvidia*"
_CHANNEL, _RULES = 3, 4
_ENV_START, _ENV_END = 47, 48
"""Fields of /proc/PID/stat, from the state on (proc_pid_stat(5))."""


class ConfinementError(RuntimeError):
    """This machine cannot confine a process as it must be."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a process that runs untrusted code is left with: made once, entered by each."""

    mode: Mode
    memory_bytes: int
    result_bytes: int
    max_threads: int
    gpu: bool
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
        gpu: bool = False,
        shared_memory: Iterable[Path] = (),
    ) -> Confinement:
        """`readable`: the model's files, beyond the interpreter and its libraries; `shared_memory`: the
        files in which weights on GPUs are counted.

        Raises:
            ConfinementError: if this machine cannot confine as `mode` asks.
        """
        verify(mode)
        rules = calls = None
        if mode != "off":
            with _allowing_less(mode):
                # Here, because to find libseccomp it runs another program.
                from ndif.sandbox.calls import Filter

                calls = Filter.compile(devices=gpu)
            reading = [*interpreter(), *map(Path, _SYSTEM), *readable]
            writing = [Path(os.devnull)]
            if gpu:
                reading += map(Path, _DRIVER)
                writing += [*Path("/dev").glob(_DEVICES), *shared_memory]
            with _allowing_less(mode):
                from ndif.sandbox.files import ruleset

                rules = ruleset(reading, writing)
        return cls(mode, memory_bytes, result_bytes, max_threads, gpu, rules, calls)

    def isolate(self, channel: int) -> int:
        """Part this process from what it has from its parent; where its `channel` is now.

        The channel, and until `enter` the rules, are its only descriptors: the standard streams lead
        nowhere.
        """
        if self.mode == "off":
            return channel
        os.environ.clear()
        _erase_environment()
        os.setsid()
        # As long as /proc can be opened.
        _first_to_die()
        _keep_only(channel, self.rules)
        return _CHANNEL

    def enter(self) -> None:
        """Confine this process for good.

        It must have one thread: what is taken from a thread is taken from those that it starts. On a
        GPU, `finish` follows once CUDA has started.

        Raises:
            ConfinementError: if this machine cannot, and must.
        """
        if self.mode == "off":
            return
        with _allowing_less(self.mode):
            memory = None if self.gpu else self.memory_bytes
            limits.restrict(memory, self.result_bytes, self.max_threads)
        with _allowing_less(self.mode):
            privileges.drop()
        if self.rules is not None:
            with _allowing_less(self.mode):
                from ndif.sandbox.files import restrict

                restrict(_RULES)
        if not self.gpu:
            self.finish()

    def finish(self) -> None:
        """Take the system calls, too: of every thread there is.

        Raises:
            ConfinementError: if this machine cannot, and must.
        """
        if self.calls is not None:
            with _allowing_less(self.mode):
                self.calls.load()

    def permit_file(self) -> None:
        """Let this process write the file that it was handed for its result."""
        if self.mode != "off":
            limits.permit_file()


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
    paths.update(_folders_of_libraries())
    return sorted(path.resolve() for path in paths if path.exists())


def _folders_of_libraries() -> Iterable[Path]:
    """A library that is loaded has neighbours that it may load."""
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
