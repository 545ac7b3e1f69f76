"""The confinement of one process: the resources it keeps, and the order in which it gives up the others."""

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

# Public certificates: an HTTP client reads them at construction, and libraries construct one offline too.
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
"""Prefixes of environment variables that select GPUs and configure how they compute."""
_LIBRARY_ROOTS = ("/lib", "/lib64", "/usr", "/opt", "/nix", "/gnu")
"""Folders of libraries that the system installs."""
_CHANNEL_FD, _RULESET_FD = 3, 4
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""Suffixes of files of weights, which operators link into a folder from where their disks have room."""
_ENV_START, _ENV_END = 47, 48
"""Indices of fields of /proc/PID/stat, counted from the state (proc_pid_stat(5))."""


class ConfinementError(RuntimeError):
    """This machine cannot confine a process as the mode requires."""


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """Files that a process on GPUs needs, found by a process that already uses them."""

    libraries: tuple[str, ...]
    """Folders of the interpreter, and of all libraries once the driver has loaded its own."""
    devices: tuple[str, ...]
    """Device files of the driver and of the GPUs in use."""
    shared_memory: tuple[str, ...]
    """Files that the process shares with the owner of the weights."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """The confinement of processes that run untrusted code: each process applies it to itself.

    Owns the Landlock ruleset and the seccomp filter that hold while untrusted code runs. On a GPU, a
    process first applies a wider ruleset, built by itself, in which the driver starts and no byte of a
    request is read. Time, and memory on GPUs, are left to the host's resource watchdog.
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
    """Folders whose files can be read by who knows their names."""

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
        files, named = tuple(readable), tuple(unlisted)
        rules = calls = None
        if mode != "off":
            with allowing_less(mode):
                # Imported here: the import runs another program to find libseccomp.
                from ndif.sandbox.confinement.seccomp import Filter

                calls = Filter.compile(devices=driver is not None)
            rules = make_ruleset(mode, *_paths(files, driver), (), (), named)
        return cls(
            mode, memory_bytes, result_bytes, max_threads, files, driver, rules, calls, named
        )

    def detach(self, channel: int) -> int:
        """Drop what this process inherited from its parent, and return the new number of `channel`.

        Only the channel and, until `apply`, the ruleset stay open; the standard streams lead to /dev/null.
        The environment keeps the driver's variables until the driver has started.
        """
        if self.mode == "off":
            return channel
        kept = driver_variables() if self.driver is not None else {}
        os.environ.clear()
        _erase_initial_environment()
        os.environ.update(kept)
        if os.getsid(0) != os.getpid():
            os.setsid()
        # If memory runs out, the kernel kills this process before others. Set while /proc can be opened.
        score = Path("/proc/self/oom_score_adj")
        if score.read_text().strip() != "1000":  # its parent may have seen to it
            score.write_text("1000")
        _close_other_descriptors(channel, self.rules)
        return _CHANNEL_FD

    def apply(
        self, start_driver: Callable[[], None] | None = None, *, keeps_reading: bool = False
    ) -> None:
        """Confine this process irrevocably.

        The process must have one thread: threads inherit the restrictions of the thread that starts them.

        Args:
            start_driver: Starts the driver of a GPU, and all else that needs more access than untrusted
                code. For the threads that it starts, see docs/gpu.md.
            keeps_reading: See `limits.drop_privileges`; other users' files are still those of the rules.

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
            # Limits follow the driver's start, in which the driver sizes memory files.
            self._limit(None)
        if self.mode == "off":
            return
        os.environ.clear()
        self._enforce(None if self.rules is None else _RULESET_FD)
        if self.calls is not None:
            self._attempt(self.calls.load)

    def _attempt(self, step: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Take a step unless the mode is "off"; see `allowing_less`."""
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
        """Make the wider ruleset in which a driver starts."""
        if self.mode == "off" or self.driver is None:
            yield None
            return
        with driver_ruleset(self.mode, self.readable, self.driver) as rules:
            yield rules

    def _enforce(self, rules: int | None) -> None:
        """Restrict this process to the files of a ruleset; None if this kernel has no Landlock."""
        if rules is not None:
            from ndif.sandbox.confinement.landlock import restrict_self

            self._attempt(restrict_self, rules)

    def result_file_allowed(self) -> contextlib.AbstractContextManager[None]:
        """Let this process write to the result file that the host passed to it while the context lasts."""
        return contextlib.nullcontext() if self.mode == "off" else limits.result_file_allowed()

    def paths(self) -> tuple[list[Path], list[Path]]:
        """Return the paths that untrusted code may read, and those that it may also write to."""
        return _paths(self.readable, self.driver)


def driver_variables() -> dict[str, str]:
    """Return this process's environment variables that select GPUs and configure how they compute."""
    return {name: value for name, value in os.environ.items() if name.startswith(_DRIVER_VARIABLES)}


def _paths(readable: Iterable[Path], driver: DriverFiles | None) -> tuple[list[Path], list[Path]]:
    """Return the paths that untrusted code may read, and those that it may also write to."""
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
    """Make a Landlock ruleset in which a GPU's driver starts and works; None without Landlock.

    The context keeps the directory of this process's threads open, which a rule of the set refers to.
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
    """Turn the failure of a step into ConfinementError if the mode is "require"; ignore it otherwise."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        if mode == "require":
            raise ConfinementError(f"This machine could not confine a process: {error}") from error


def verify(mode: Mode) -> None:
    """Check that this machine has the layers that `mode` requires.

    Raises:
        ConfinementError: If a layer is missing; the message names it and says what to do.
    """
    lacking = missing_layers(detect_layers()) if mode == "require" else []
    if lacking:
        named = "; ".join(f"{layer.name} ({layer.detail})" for layer in lacking)
        raise ConfinementError(
            f"Untrusted code cannot be confined on this machine: it lacks {named}. `ndif doctor` shows "
            "every layer. NDIF_SANDBOX=best-effort runs untrusted code with the layers that exist here."
        )


def runtime_paths() -> list[Path]:
    """Return what any confined process may read: the interpreter, its packages, the machine's facts."""
    return [*interpreter_paths(), *map(Path, _SYSTEM.split())]


def interpreter_paths() -> list[Path]:
    """Return the folders of Python, of its packages, and of the libraries that they load.

    Another folder of the search path, such as a source tree or somebody's home, holds more than packages.
    Of such a one only the packages and modules that this process has loaded are returned.
    """
    # A virtual environment has packages of its own and the modules of its base interpreter.
    places = [None, *({"base": each, "platbase": each} for each in (sys.prefix, sys.base_prefix))]
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {Path(sysconfig.get_path(name, vars=place)) for place in places for name in names}
    paths.update(path for path in map(Path, filter(None, sys.path)) if holds_packages(path))
    paths.update(_loaded_elsewhere(paths))
    paths.update(_libraries(paths))
    return sorted(path.resolve() for path in paths if path.exists())


def holds_packages(path: Path) -> bool:
    """Return True for a folder of installed packages, or an archive of modules."""
    if path.name in ("site-packages", "dist-packages") or path.is_file():
        return True
    return any(path.glob("*.dist-info"))


def module_path(spec: object) -> list[Path]:
    """Return the folders of a package, or the file of a module; nothing for a built-in one."""
    if not isinstance(spec, ModuleSpec):
        return []
    if spec.submodule_search_locations is not None:
        return [Path(each) for each in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.has_location and spec.origin else []


def _loaded_elsewhere(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield what was loaded from outside some folders: packages and modules without a dot in their name."""
    known = tuple(folders)
    for name, module in list(sys.modules.items()):
        if "." not in name:
            for path in module_path(getattr(module, "__spec__", None)):
                if not any(path.is_relative_to(each) for each in known):
                    yield path


def _libraries(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the folder of each loaded library, which may load its neighbours later.

    Of a folder that is neither the system's nor among `folders`, yield the libraries alone.
    """
    known = (*folders, *map(Path, (*_LIBRARY_ROOTS, sys.prefix, sys.base_prefix)))
    for folder in set(library_folders()):
        if any(folder.is_relative_to(each) for each in known):
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
    """Return the folders to which the links of a snapshot in the Hub's cache lead.

    They may be links to another disk themselves. Nothing for a folder that is no such snapshot.
    """
    folder = folder.resolve()
    repository = folder.parent.parent
    has_its_parts = any((repository / name).is_dir() for name in ("blobs", "refs"))
    if folder.parent.name != "snapshots" or not has_its_parts:
        return []
    # The blobs of a repository may link to those of the cache.
    return [(each / "blobs").resolve() for each in (repository, repository.parent)]


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return a model's folder and the files to which its links lead.

    A snapshot's files link to blobs. Into a folder of their own, operators link weights. No other link is
    followed: a repository could have any file of this machine read.
    """
    folder = folder.resolve()
    links = {file: Path(os.path.realpath(file)) for file in folder.rglob("*") if file.is_symlink()}
    files = {link: file for link, file in links.items() if file.is_file()}
    blobs = linked_folders(folder)
    if not blobs:
        return sorted({folder, *(file for link, file in files.items() if link.suffix in WEIGHTS)})
    of_cache = {file for file in files.values() if any(map(file.is_relative_to, blobs))}
    # The Hub's library looks up the commit of a revision, and lists those that are here.
    return sorted({folder.parent, folder.parent.parent / "refs", *of_cache})


def _erase_initial_environment() -> None:
    """Overwrite the environment on the stack, where the kernel put it when this program started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    ctypes.memset(start, 0, end - start)


def _close_other_descriptors(channel: int, rules: int | None) -> None:
    """Move two descriptors to their numbers, close all others, and open /dev/null as standard streams."""
    # First above both numbers, so that neither overwrites the other.
    channel = fcntl.fcntl(channel, fcntl.F_DUPFD, _RULESET_FD + 1)
    if rules is not None:
        os.dup2(fcntl.fcntl(rules, fcntl.F_DUPFD, _RULESET_FD + 1), _RULESET_FD, inheritable=False)
    os.dup2(channel, _CHANNEL_FD, inheritable=False)
    os.closerange(_RULESET_FD + (rules is not None), os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
