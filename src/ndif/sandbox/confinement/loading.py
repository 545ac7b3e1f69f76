"""The confinement of code that reads a model repository: only its files and the runtime's can be opened."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ndif.sandbox.confinement import limits
from ndif.sandbox.confinement.confinement import (
    DriverFiles,
    Mode,
    allowing_less,
    driver_ruleset,
    make_ruleset,
    runtime_paths,
    verify,
)

if TYPE_CHECKING:
    from ndif.sandbox.confinement.seccomp import Filter

Result = TypeVar("Result")

_OWN_FACTS = "/proc/self /proc/stat /proc/version /proc/filesystems /proc/sys/vm /sys/fs/cgroup"
"""Files from which libraries learn about memory and processors."""
_PROCESSES = "/proc"
"""Files by which a process observes its children; the kernel shows little of other processes."""


@dataclass(frozen=True, slots=True)
class LoadingConfinement:
    """The confinement of a thread, or of a process and its children, while it reads a repository.

    Owns a Landlock ruleset and a seccomp filter, which the kernel applies to a thread and to threads that
    it starts. A process that needs more rights later confines only a thread. This contains any effect of
    files on libraries, but not code in the process, which could change state that other threads use.
    """

    mode: Mode
    whole: bool
    """True for a process, which may fork others; False for a thread."""
    rules: int | None
    """Descriptor of the Landlock ruleset; None if this kernel has no Landlock."""
    calls: Filter | None
    """The seccomp filter of system calls; None if this machine has no seccomp."""

    @classmethod
    @contextlib.contextmanager
    def prepare(
        cls,
        mode: Mode,
        readable: Iterable[Path],
        creatable: Iterable[Path] = (),
        *,
        whole: bool = False,
        driver: DriverFiles | None = None,
    ) -> Iterator[LoadingConfinement]:
        """Compile the rules of a confinement that is entered while the context lasts.

        Args:
            mode: See `Confinement`.
            readable: The repository's files.
            creatable: Folders in which files may be made.
            whole: See the attribute.
            driver: Files of a GPU's driver that this process has started. Disables the filter of calls.

        Raises:
            ConfinementError: If this machine cannot confine as `mode` requires.
        """
        verify(mode)
        making = tuple(creatable)
        files = [*map(Path, (_PROCESSES if whole else _OWN_FACTS).split()), *readable]
        if mode == "off":
            yield cls(mode, whole, None, None)
        elif driver is not None:
            with driver_ruleset(mode, files, driver, making) as rules:
                yield cls(mode, whole, rules, None)
        else:
            calls = None
            with allowing_less(mode):
                from ndif.sandbox.confinement.seccomp import Filter

                calls = Filter.compile(creation=bool(making), forking=whole)
            reading = [*runtime_paths(), *files]
            rules = make_ruleset(mode, reading, [Path("/dev/null")], (), making)
            yield cls(mode, whole, rules, calls)

    def run(self, read: Callable[[], Result]) -> Result:
        """Call `read` under the confinement; return its result or raise its error."""
        if self.mode == "off":
            return read()
        if self.whole:
            self._enter()
            return read()
        results: list[Result] = []
        errors: list[BaseException] = []

        def run_confined() -> None:
            try:
                self._enter()
                results.append(read())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run_confined, name="load")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def _enter(self) -> None:
        """Confine this thread irrevocably; if it is the only one, that confines the process."""
        with allowing_less(self.mode):
            limits.keep_reading()
        if self.rules is not None:
            with allowing_less(self.mode):
                from ndif.sandbox.confinement.landlock import restrict_self

                restrict_self(self.rules)
        if self.calls is not None:
            with allowing_less(self.mode):
                self.calls.load(this_thread=True)
