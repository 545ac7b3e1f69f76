"""The confinement of a process: the resources that it keeps, and the order of dropping all others."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ndif.sandbox.confinement import limits
from ndif.sandbox.confinement.layers import detect_layers, missing_layers

if TYPE_CHECKING:
    from ndif.sandbox.confinement.seccomp import Filter

Mode = Literal["require", "best-effort", "off"]

# Certificates are included because libraries construct HTTP clients, which read them, even offline.
_SYSTEM = """
    /etc/ld.so.cache /etc/localtime /usr/share/zoneinfo /dev/urandom
    /proc/cpuinfo /proc/meminfo /sys/devices/system/cpu /sys/devices/system/node
    /etc/ssl/certs /etc/pki/tls/certs /etc/pki/ca-trust/extracted
    /usr/share/ca-certificates /usr/local/share/ca-certificates
"""
_DRIVER = """
    /proc/driver/nvidia /proc/driver/nvidia-uvm /proc/driver/nvidia-caps /proc/devices
    /sys/bus/pci /sys/devices /sys/module
"""
_DRIVER_STARTS = ("/proc/self", "/proc/modules", "/proc/sys/vm/mmap_min_addr")
"""Files that a GPU's driver reads only while it starts."""
_OWN_THREADS = Path("/proc/self/task")
"""Directory where drivers from version 570 on name their threads; if refused, cuInit returns 304."""
_DRIVER_VARIABLES = ("CUDA_", "CUBLAS_", "NVIDIA_", "PYTORCH_", "TORCH_")
"""Prefixes of environment variables that select and configure GPUs."""
_LIBRARY_ROOTS = ("/lib", "/lib64", "/usr", "/opt", "/nix", "/gnu")
"""Folders of libraries that the system installs."""
_CHANNEL_FD, _RULESET_FD = 3, 4
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""Suffixes of weight files, which operators may link into a model's folder from another disk."""
_ENV_START, _ENV_END = 47, 48
"""Indices of fields of /proc/PID/stat, counted from the state (proc_pid_stat(5))."""


class ConfinementError(RuntimeError):
    """This machine cannot confine a process as the mode requires."""


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """Files that a process needs to use GPUs, listed by a process that already uses them."""

    libraries: tuple[str, ...]
    """Folders of the interpreter and of all loaded libraries, the driver's included."""
    devices: tuple[str, ...]
    """Device files of the driver and of the GPUs in use."""
    shared_memory: tuple[str, ...]
    """Files that the process shares with the owner of the weights."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """The confinement of processes that run untrusted code; each process applies it to itself.

    Owns the Landlock ruleset and the seccomp filter that are in force while untrusted code runs. On a GPU,
    a process first applies a wider ruleset of its own, in which the driver starts; it reads no byte of a
    request until the narrower one is in force. The host's resource watchdog limits time and GPU memory.
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
    """Descriptor of the Landlock ruleset; None if this kernel has no Landlock."""
    calls: Filter | None
    """The seccomp filter of system calls; None if this machine has no seccomp."""
    unlisted: tuple[Path, ...] = ()
    """Folders whose files may be read but not listed."""

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
        unlisted: Iterable[Path] = (),
    ) -> Confinement:
        """Compile the rules of a confinement; the arguments are its attributes.

        Raises:
            ConfinementError: If this machine cannot confine as `mode` requires.
        """
        verify(mode)
        files, unlisted_folders = tuple(readable), tuple(unlisted)
        rules = calls = None
        if mode != "off":
            with allowing_less(mode):
                # Imported here, because the import starts a program to find libseccomp.
                from ndif.sandbox.confinement.seccomp import Filter

                calls = Filter.compile(devices=driver is not None)
            rules = make_ruleset(mode, *_paths(files, driver), (), (), unlisted_folders)
        return cls(
            mode,
            memory_bytes,
            result_bytes,
            max_threads,
            files,
            driver,
            rules,
            calls,
            unlisted_folders,
        )

    def detach(self, channel: int) -> int:
        """Drop the inherited environment, session and descriptors; return the new number of `channel`.

        Only the channel and, until `apply`, the ruleset stay open; the standard streams lead to /dev/null.
        The driver's environment variables stay until the driver has started. In mode "off" nothing changes.
        """
        if self.mode == "off":
            return channel
        kept = driver_variables() if self.driver is not None else {}
        os.environ.clear()
        _erase_initial_environment()
        os.environ.update(kept)
        if os.getsid(0) != os.getpid():
            os.setsid()
        # If memory runs out, the kernel kills this process first. Must be set before /proc is closed off.
        score = Path("/proc/self/oom_score_adj")
        if score.read_text().strip() != "1000":  # the parent may have set it
            score.write_text("1000")
        _close_other_descriptors(channel, self.rules)
        return _CHANNEL_FD

    def apply(
        self, start_driver: Callable[[], None] | None = None, *, keeps_reading: bool = False
    ) -> None:
        """Confine this process irrevocably.

        The process must have one thread: threads inherit the restrictions of the thread that starts them.

        Args:
            start_driver: Starts a GPU's driver, and everything else that needs more access than untrusted
                code. For the threads that it starts, see docs/gpu.md.
            keeps_reading: See `limits.drop_privileges`; the ruleset still applies. Ignored with a driver.

        Raises:
            ConfinementError: If this machine cannot confine as the mode requires.
        """
        self._attempt(limits.limit_tasks, self.max_threads)
        if start_driver is None:
            self._limit(self.memory_bytes)
            self._attempt(limits.drop_privileges, keeps_reading=keeps_reading)
        else:
            with self._driver_ruleset() as rules:
                self._drop_privileges()
                self._enforce(rules)
                start_driver()
            # Set after the driver's start, because the driver sizes memory files while it starts.
            self._limit(None)
        if self.mode == "off":
            return
        os.environ.clear()
        self._enforce(None if self.rules is None else _RULESET_FD)
        if self.calls is not None:
            self._attempt(self.calls.load)

    def _attempt(self, step: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Run a step unless the mode is "off"; see `allowing_less`."""
        if self.mode != "off":
            with allowing_less(self.mode):
                step(*arguments, **options)

    def _limit(self, memory_bytes: int | None) -> None:
        driven = self.driver is not None
        self._attempt(limits.apply_limits, memory_bytes, self.result_bytes, beside_a_driver=driven)

    def _drop_privileges(self) -> None:
        self._attempt(limits.drop_privileges)

    @contextlib.contextmanager
    def _driver_ruleset(self) -> Iterator[int | None]:
        """Yield the wider ruleset in which a driver starts; None in mode "off" or without a driver."""
        if self.mode == "off" or self.driver is None:
            yield None
            return
        with driver_ruleset(self.mode, self.readable, self.driver) as rules:
            yield rules

    def _enforce(self, rules: int | None) -> None:
        if rules is not None:
            from ndif.sandbox.confinement.landlock import restrict_self

            self._attempt(restrict_self, rules)

    def result_file_allowed(self) -> contextlib.AbstractContextManager[None]:
        """Let this process write to the result file from the host while the context lasts."""
        return contextlib.nullcontext() if self.mode == "off" else limits.result_file_allowed()

    def paths(self) -> tuple[list[Path], list[Path]]:
        """Return the paths that untrusted code may read, and the paths that it may also write."""
        return _paths(self.readable, self.driver)


def driver_variables() -> dict[str, str]:
    """Return this process's environment variables that select and configure GPUs."""
    return {name: value for name, value in os.environ.items() if name.startswith(_DRIVER_VARIABLES)}


def _paths(readable: Iterable[Path], driver: DriverFiles | None) -> tuple[list[Path], list[Path]]:
    reading = [*runtime_paths(), *readable]
    writing = [Path(os.devnull)]
    if driver is not None:
        reading += map(Path, (*_DRIVER.split(), *driver.libraries))
        writing += map(Path, (*driver.devices, *driver.shared_memory))
    return reading, writing


def make_ruleset(mode: Mode, *paths: Iterable[Path]) -> int | None:
    """Return a Landlock ruleset; None if this kernel has no Landlock and `mode` allows that."""
    with allowing_less(mode):
        from ndif.sandbox.confinement.landlock import create_ruleset

        return create_ruleset(*paths)
    return None


@contextlib.contextmanager
def driver_ruleset(
    mode: Mode, readable: Iterable[Path], driver: DriverFiles, creatable: Iterable[Path] = ()
) -> Iterator[int | None]:
    """Yield a Landlock ruleset in which a GPU's driver starts and works; None without Landlock.

    The context keeps this process's directory of threads open, because a rule refers to it.
    """
    threads = os.open(_OWN_THREADS, os.O_PATH | os.O_CLOEXEC)
    try:
        reading, writing = _paths(readable, driver)
        reading += map(Path, _DRIVER_STARTS)
        yield make_ruleset(mode, reading, writing, [_OWN_THREADS], creatable)
    finally:
        os.close(threads)


@contextlib.contextmanager
def allowing_less(mode: Mode) -> Iterator[None]:
    """Re-raise errors as ConfinementError if the mode is "require"; suppress them otherwise."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        if mode == "require":
            raise ConfinementError(f"This machine could not confine a process: {error}") from error


def verify(mode: Mode) -> None:
    """Check that this machine has the layers that `mode` requires.

    Raises:
        ConfinementError: If a layer is missing; the message names it and a remedy.
    """
    lacking = missing_layers(detect_layers()) if mode == "require" else []
    if lacking:
        named = "; ".join(f"{layer.name} ({layer.detail})" for layer in lacking)
        raise ConfinementError(
            f"Untrusted code cannot be confined on this machine: it lacks {named}. `ndif doctor` shows "
            "every layer. NDIF_SANDBOX=best-effort runs untrusted code with the layers that exist here."
        )


def runtime_paths() -> list[Path]:
    """Return the paths that every confined process may read: interpreter, packages, machine facts."""
    return [*interpreter_paths(), *map(Path, _SYSTEM.split())]


def interpreter_paths() -> list[Path]:
    """Return the folders of Python, of its packages, and of the libraries that they load.

    Other folders of `sys.path`, such as a source tree or a home directory, hold more than packages. From
    these, only the packages and modules that this process has loaded are returned.
    """
    # A virtual environment has packages of its own and the modules of its base interpreter.
    places = [
        None,
        *({"base": prefix, "platbase": prefix} for prefix in (sys.prefix, sys.base_prefix)),
    ]
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {Path(sysconfig.get_path(name, vars=place)) for place in places for name in names}
    paths.update(path for path in map(Path, filter(None, sys.path)) if holds_packages(path))
    paths.update(_loaded_elsewhere(paths))
    paths.update(_libraries(paths))
    return sorted(path.resolve() for path in paths if path.exists())


def holds_packages(path: Path) -> bool:
    """Return True for a folder of installed packages and for an archive of modules."""
    if path.name in ("site-packages", "dist-packages") or path.is_file():
        return True
    return any(path.glob("*.dist-info"))


def module_path(spec: object) -> list[Path]:
    """Return the folders of a package or the file of a module; [] for a built-in module."""
    if not isinstance(spec, ModuleSpec):
        return []
    if spec.submodule_search_locations is not None:
        return [Path(location) for location in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.has_location and spec.origin else []


def _loaded_elsewhere(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths of top-level packages and modules that were loaded from outside `folders`."""
    roots = tuple(folders)
    for name, module in list(sys.modules.items()):
        if "." not in name:
            for path in module_path(getattr(module, "__spec__", None)):
                if not any(path.is_relative_to(root) for root in roots):
                    yield path


def _libraries(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the folder of each loaded library, which may load its neighbours later.

    Instead of a folder outside `folders` and the system's, yield the `*.so*` files in it.
    """
    roots = (*folders, *map(Path, (*_LIBRARY_ROOTS, sys.prefix, sys.base_prefix)))
    for folder in set(library_folders()):
        if any(folder.is_relative_to(root) for root in roots):
            yield folder
        else:
            yield from folder.glob("*.so*")


def library_folders() -> Iterable[Path]:
    """Yield the folder of each loaded library."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.partition("/")[2]
        if ".so" in name:
            yield Path("/", name).parent


def linked_folders(folder: Path) -> list[Path]:
    """Return the blob folders to which a snapshot in the Hub's cache links; [] for any other folder.

    The paths are resolved, because the folders may themselves be links to another disk.
    """
    folder = folder.resolve()
    repository = folder.parent.parent
    has_its_parts = any((repository / name).is_dir() for name in ("blobs", "refs"))
    if folder.parent.name != "snapshots" or not has_its_parts:
        return []
    # The blobs of a repository may link to the blobs of the cache.
    return [(base / "blobs").resolve() for base in (repository, repository.parent)]


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the folders of a model and the files to which its links lead.

    In a snapshot of the Hub's cache, only links to blobs are followed; in an operator's own folder, only
    links named like weights. Any other link could make the server read any file of this machine.
    """
    folder = folder.resolve()
    links = {file: Path(os.path.realpath(file)) for file in folder.rglob("*") if file.is_symlink()}
    files = {link: file for link, file in links.items() if file.is_file()}
    blobs = linked_folders(folder)
    if not blobs:
        return sorted({folder, *(file for link, file in files.items() if link.suffix in WEIGHTS)})
    blob_files = {file for file in files.values() if any(map(file.is_relative_to, blobs))}
    # The Hub's library looks up a revision's commit in `refs`, and lists the local snapshots.
    return sorted({folder.parent, folder.parent.parent / "refs", *blob_files})


def _erase_initial_environment() -> None:
    """Overwrite the environment on the stack, where the kernel put it at the start of this program."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    ctypes.memset(start, 0, end - start)


def _close_other_descriptors(channel: int, rules: int | None) -> None:
    """Move both descriptors to fixed numbers, close all others, and open /dev/null as standard streams."""
    # Both are first moved above the fixed numbers, so that neither overwrites the other.
    channel = fcntl.fcntl(channel, fcntl.F_DUPFD, _RULESET_FD + 1)
    if rules is not None:
        os.dup2(fcntl.fcntl(rules, fcntl.F_DUPFD, _RULESET_FD + 1), _RULESET_FD, inheritable=False)
    os.dup2(channel, _CHANNEL_FD, inheritable=False)
    os.closerange(_RULESET_FD + (rules is not None), os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
