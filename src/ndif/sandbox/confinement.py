"""The whole confinement of one process: what it keeps, and in which order the rest is taken."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ndif.sandbox import limits, privileges
from ndif.sandbox.layers import layers, missing

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
)
_DRIVER = ("/proc/driver/nvidia", "/proc/devices", "/sys/bus/pci", "/sys/devices", "/sys/module")
_DEVICES = "nvidia*"
_FIRST_FD = 3


class ConfinementError(RuntimeError):
    """This machine cannot confine a process as it must be."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a process that runs untrusted code is left with."""

    mode: Mode
    readable: tuple[Path, ...]
    """Folders and files beyond the interpreter and its libraries: the model's."""
    memory_bytes: int
    result_bytes: int
    max_threads: int
    shared_memory: tuple[Path, ...] = ()
    """Files in which weights on GPUs are counted."""
    gpu: bool = False

    def isolate(self, channel: int) -> int:
        """Part this process from what it has from its parent; where its `channel` is now.

        That one is its only descriptor: the standard streams lead nowhere.
        """
        if self.mode == "off":
            return channel
        os.environ.clear()
        os.setsid()
        # As long as /proc can be opened.
        _first_to_die()
        return _close_all_but(channel)

    def enter(self) -> None:
        """Confine this process for good.

        It must have one thread: what is taken from a thread is taken from those that it starts. On a
        GPU, `finish` follows once CUDA has started.

        Raises:
            ConfinementError: if this machine cannot, and must.
        """
        if self.mode == "off":
            return
        self._apply(lambda: limits.restrict(self._memory(), self.result_bytes, self.max_threads))
        self._apply(privileges.drop)
        self._apply(self._restrict_files)
        if not self.gpu:
            self.finish()

    def finish(self) -> None:
        """Take the system calls, too: of every thread there is."""
        if self.mode != "off":
            self._apply(self._restrict_calls)

    def permit_file(self) -> None:
        """Let this process write the file that it was handed for its result."""
        if self.mode != "off":
            limits.permit_file()

    def _memory(self) -> int | None:
        return None if self.gpu else self.memory_bytes

    def _restrict_files(self) -> None:
        from ndif.sandbox.files import restrict

        readable = [*interpreter(), *map(Path, _SYSTEM), *self.readable]
        writable = [Path(os.devnull)]
        if self.gpu:
            readable += [*map(Path, _DRIVER), Path(f"/proc/{os.getpid()}")]
            writable += [*Path("/dev").glob(_DEVICES), *self.shared_memory]
        restrict(readable, writable)

    def _restrict_calls(self) -> None:
        from ndif.sandbox.calls import restrict

        restrict(devices=self.gpu)

    def _apply(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (ImportError, OSError, RuntimeError) as error:
            if self.mode == "require":
                raise ConfinementError(f"This process could not be confined: {error}") from error


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


def _first_to_die() -> None:
    """Memory that runs out is this process's to give back, not its neighbours'."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def _close_all_but(keep: int) -> int:
    """One descriptor, and standard streams that lead nowhere."""
    os.dup2(keep, _FIRST_FD)
    os.closerange(_FIRST_FD + 1, os.sysconf("SC_OPEN_MAX"))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    return _FIRST_FD
