"""The reset of a confined process between two requests of one user.

After a reset the process shows no more of an earlier request than a new process does. State that is simple
to restore is restored: settings of torch and numpy, the model's hooks, modules that the request brought.
Any other change is only detected: the process ends, and the next request gets a new one. Random generators
of torch and numpy are neither restored nor checked, because each request begins with a new seed.

The reset is not a boundary between users: a process serves one user only.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import sys
import threading
import time
import types
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ndif.runtime.process.heap import KEPT_TOP, trim
from ndif.runtime.process.libraries import FOLDERS, is_of_a_library
from ndif.runtime.process.model_state import ModuleTreeState, ResetError, WeightsMemory
from ndif.runtime.process.process_settings import ProcessSettings
from ndif.runtime.process.procfs import ProcFiles

if TYPE_CHECKING:
    from ndif.runtime.generations import Generation
    from ndif.runtime.process.cuda import Cuda
    from ndif.runtime.process.isolation import Isolation

_THREAD_EXIT_S = 0.5
"""Seconds for the block's threads to end. Python joins a thread before the kernel has removed it, and
nnsight runs each invoke in a thread."""
_THREAD_POLL_S = 0.001

_SLACK_BYTES = 64 << 20
"""Bytes that the allocators may keep; they reduce the memory that the next request may take."""
_TRIM_BYTES = 16 << 20
"""Growth in bytes above which freed memory is returned to the system."""

_INTERPRETER_NOTES = frozenset({"__slotnames__", "__warningregistry__", "__signature__"})
"""Attributes that Python itself adds to classes and modules, as caches or to warn once."""

_COUNTERS = (".hooks.RemovableHandle", "._lazy_seed_tracker", "._queued_calls")
"""Objects that torch changes when hooks are registered or seeds are set; restoring them is harmless."""


class Reset:
    """The reset of a runner's process to the state that `begin` recorded."""

    def __init__(
        self,
        generation: Generation,
        driver: Cuda | None,
        isolation: Isolation,
        proc_files: ProcFiles,
    ) -> None:
        assert isolation.namespaces is not None  # noqa: S101 - the zygote creates them for a reset
        self.proc_files = proc_files
        self._generation = generation
        self._driver = driver
        self._namespaces = isolation.namespaces
        self._isolation = isolation
        self._guarded = isolation.policy is not None

    def begin(self) -> None:
        """Record the state of the process before the first request."""
        _start_threads(self._generation.model)
        self._generation.forget()
        gc.collect()
        self._namespaces.inherit()
        self._settings = ProcessSettings(self._isolation.settings)
        self._exit_functions = atexit._ncallbacks()
        self._model = self._isolation.model_state or ModuleTreeState(self._generation.model)
        # The weight owner verifies weights on devices.
        module = self._generation.model._module if self._driver is None else torch.nn.Module()
        self._weights = WeightsMemory(module, self.proc_files)
        self._threads = self.proc_files.threads()
        self._data = self.proc_files.data_bytes()
        self._anonymous = self.proc_files.anonymous_bytes()
        self._descriptors = _descriptors()
        # With present objects frozen, the collector tracks the objects of requests only.
        gc.freeze()

    def __call__(self, header: Mapping[str, Any], *, rested: bool) -> None:
        """Remove everything that a request left; raise ResetError if something cannot be removed.

        If the process `rested` (was idle) before the request, it will probably rest again, so it returns
        free memory.
        """
        if header["env"].get("peft"):
            raise ResetError("an adapter was put on the model")
        self._check_threads()
        if (setting := self._settings.restore()) is not None:
            raise ResetError(f"{setting} cannot be restored")
        if atexit._ncallbacks() != self._exit_functions:
            raise ResetError("a function was registered for the end of the process")
        self._generation.forget()
        self._generation.prepare({})
        self._model.restore()
        self._isolation.forget_decoded()
        self._check_objects(loaded=self._restore_namespaces())
        self._weights.check()
        self._check_memory()
        if _descriptors() != self._descriptors:
            raise ResetError("descriptors were opened, closed or changed")
        if rested:
            trim(KEPT_TOP)
        if self._driver is not None:
            # The host stops a runner that could write to shared weights as soon as it is idle.
            self.decode_ahead()

    def decode_ahead(self) -> None:
        """Decode the part of the next payload that is common to all payloads.

        Call this after the reset: the decoded objects belong to the next request and must not be frozen.
        """
        self._isolation.decode_ahead()

    def _check_threads(self) -> None:
        deadline = time.monotonic() + _THREAD_EXIT_S
        while (
            len(sys._current_frames()) > 1
            or threading.active_count() > 1
            or self.proc_files.threads() > self._threads
        ):
            if time.monotonic() > deadline:
                raise ResetError("a thread is still running")
            time.sleep(_THREAD_POLL_S)

    def _restore_namespaces(self) -> bool:
        """Restore modules and classes; return True if the request loaded libraries of the server."""
        namespaces = self._namespaces
        loaded = namespaces.restore_modules(is_of_a_library)
        if loaded and not self._guarded:
            # The changes by the module cannot be distinguished from the changes by the request.
            raise ResetError(f"the module {loaded} was loaded")
        if (function := namespaces.patched()) is not None:
            raise ResetError(f"the function {function} was changed")
        changes = namespaces.changes()
        for change in [] if self._guarded else changes:
            is_note = change.members is not None and _INTERPRETER_NOTES.issuperset(change.keys())
            if not is_note and not change.name.endswith(_COUNTERS):
                raise ResetError(f"{change} was changed")
        if loaded:
            # Under the policy only libraries change libraries: when they are loaded or first used.
            namespaces.adopt(changes)
        else:
            for change in changes:
                change.restore()
        namespaces.settle()
        return bool(loaded)

    def _check_objects(self, *, loaded: bool) -> None:
        """Raise ResetError if an object of the request is alive, for any reason."""
        gc.collect()
        for obj in gc.get_objects():
            if (name := _name_of_request_object(obj, loaded=loaded)) is not None:
                raise ResetError(f"{name} is still alive")
        gc.freeze()

    def _check_memory(self) -> None:
        if self._driver is not None:
            self._driver.release_memory()
        if self.proc_files.anonymous_bytes() > self._anonymous + _TRIM_BYTES:
            trim()
        # A GPU's driver maps any amount of memory, which counts towards no limit of a request.
        if self._driver is None and self.proc_files.data_bytes() > self._data + _SLACK_BYTES:
            raise ResetError("memory was not freed")


def _descriptors() -> dict[int, tuple[int, ...]]:
    """Return the identity, mode and blocking flag of the file behind each open descriptor."""
    closed = {fd for fd, events in _DESCRIPTORS.poll(0) if events & select.POLLNVAL}
    descriptors: dict[int, tuple[int, ...]] = {}
    for fd in range(_MAX_DESCRIPTORS):
        if fd not in closed:
            status = os.fstat(fd)
            descriptors[fd] = (status.st_dev, status.st_ino, status.st_mode, os.get_blocking(fd))
    return descriptors


_MAX_DESCRIPTORS = 256
_DESCRIPTORS = select.poll()
"""Finds all closed descriptors in one call."""
for _fd in range(_MAX_DESCRIPTORS):
    _DESCRIPTORS.register(_fd, 0)


def _start_threads(model: Any) -> None:
    """Start the persistent threads of libraries that ordinary requests would start."""
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()
    with contextlib.suppress(Exception):
        # Several texts, because a single one does not start the tokenizer's thread pool.
        model.tokenizer(["one", "two"])


def _name_of_request_object(obj: Any, *, loaded: bool) -> str | None:
    """Return the object's name if only a request can have created the object, else None.

    With `loaded`, the request has loaded libraries of the server, whose functions and classes are
    permitted.
    """
    kind = type(obj)
    if kind is types.FunctionType:
        file = obj.__code__.co_filename
        if not file.startswith(FOLDERS) and not (loaded and file.startswith("<")):
            return f"the function {obj.__qualname__}"
    if issubclass(kind, type) and not (loaded and is_of_a_library(sys.modules.get(obj.__module__))):
        return f"the class {obj.__qualname__}"
    if issubclass(kind, torch.Tensor):
        return "a tensor"
    if kind in _RUNNING:
        return f"a {kind.__name__}"
    if issubclass(kind, weakref.finalize):
        return "a finalizer"
    return None


_RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType)
