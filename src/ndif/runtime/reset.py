"""The reset of a confined process between two requests of one user.

A new process shows nothing of another request; this one must show no more. What is simple to put back is
put back: torch's and numpy's settings, random numbers, the model's hooks, modules that came with the
request. Of all else it is enough to see that it was touched: then the process ends, and the next request
gets a new one.

Nothing here keeps users apart: a process never serves two of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ndif.runtime.proc_files import ProcFiles, content
from ndif.runtime.process_settings import Setting, settings, stop_timers

if TYPE_CHECKING:
    from ndif.runtime.driver import Driver
    from ndif.runtime.frames import Channel
    from ndif.runtime.generations import Generation
    from ndif.runtime.stranger import Stranger

_KEPT_BYTES = 64 << 20
"""Memory that may stay with the allocators, which the next request's allowance lacks."""
_TRIM_BYTES = 16 << 20
"""Growth from which freed memory is given back to the system."""


_NOTES = frozenset({"__slotnames__", "__warningregistry__", "__signature__"})
"""What Python itself writes down in classes and modules, to find it again faster or to warn once."""


_COUNTERS = (".hooks.RemovableHandle", "._lazy_seed_tracker", "._queued_calls")
"""What torch itself changes where hooks are registered and seeds are set; putting it back harms nothing."""


class SpentError(Exception):
    """This process cannot be as it was; the message says what was left."""


class Reset:
    """One runner's way back to where it was before its first request.

    Owns the state that the process had (see `begin`). Restores or judges; the caller ends the process.
    """

    def __init__(
        self,
        generation: Generation,
        channel: Channel,
        driver: Driver | None,
        stranger: Stranger,
        proc_files: ProcFiles,
    ) -> None:
        assert stranger.namespaces is not None  # noqa: S101 - the zygote made them for this
        self.proc_files = proc_files
        self._generation = generation
        self._channel = channel
        self._driver = driver
        self._namespaces = stranger.namespaces
        self._guarded = stranger.policy is not None
        self._settings: list[tuple[Setting, Any]] = []
        self._limits = stranger.confinement

    def begin(self) -> None:
        """Note how everything is, before the first request."""
        _start_threads(self._generation.model)
        self._generation.forget()
        gc.collect()
        self._namespaces.inherit()
        self._settings = [(setting, setting.get()) for setting in settings(self._driver)]
        self._model = Model(self._generation.model)
        # Those of a driver's devices are another process's, which verifies them.
        own = self._generation.model._module if self._driver is None else torch.nn.Module()
        self._weights = Weights(own, self.proc_files)
        self._threads = self.proc_files.threads()
        self._data = self.proc_files.data_bytes()
        self._anonymous = self.proc_files.anonymous_bytes()
        self._descriptors = _descriptors()
        # What is here stays, and what a request leaves is all that is not frozen.
        gc.freeze()

    def __call__(self, header: Mapping[str, Any], *, spilled: bool) -> None:
        """Leave nothing of a request to the next.

        Raises:
            SpentError: if that is not possible.
        """
        if spilled:
            raise SpentError("its result lies in a file that this process could still write to")
        if header["env"].get("peft"):
            raise SpentError("an adapter was put on the model")
        self._see_threads()
        stop_timers()
        self._restore_settings()
        self._generation.forget()
        self._model.restore()
        self._see_objects(loaded=self._restore_namespaces())
        self._weights.see()
        self._see_memory()
        if _descriptors() != self._descriptors:
            raise SpentError("descriptors were opened, closed or changed")

    def _see_threads(self) -> None:
        if len(sys._current_frames()) > 1 or threading.active_count() > 1:
            raise SpentError("a thread goes on")
        if self.proc_files.threads() > self._threads:
            raise SpentError("a library's thread was started")

    def _restore_settings(self) -> None:
        for setting, before in self._settings:
            if _is(setting, before):
                continue
            if setting.put is not None:
                with contextlib.suppress(Exception):
                    setting.put(before)
            if setting.put is None or not _is(setting, before):
                raise SpentError(f"{setting.name} cannot be put back")
        # As in a new process, which `random` sees to at each fork.
        random.seed()

    def _restore_namespaces(self) -> bool:
        """Restore modules and classes; return True if the request loaded some of the server's libraries."""
        spaces = self._namespaces
        loaded = ""
        for name in spaces.modules():
            module = sys.modules.get(name)
            if spaces.has(name) or not _of_a_library(module):
                spaces.restore_module(name)
            else:
                spaces.adopt_module(name)
                loaded = name
        if loaded and not self._guarded:
            # Nobody can say which of the changes are the module's own, and which the request's.
            raise SpentError(f"the module {loaded} was loaded")
        if (function := spaces.patched()) is not None:
            raise SpentError(f"the function {function} was changed")
        changes = spaces.changes()
        if not self._guarded:
            for change in changes:
                noted = change.members is not None and _NOTES.issuperset(change.keys())
                if not noted and not change.name.endswith(_COUNTERS):
                    raise SpentError(f"{change} was changed")
        if loaded:
            # Under the policy it is libraries that change libraries: by what they load, or on first use.
            spaces.adopt(changes)
        else:
            for change in changes:
                change.restore()
        spaces.settle()
        return bool(loaded)

    def _see_objects(self, *, loaded: bool) -> None:
        """See that nothing of the request's own is alive, wherever it may be held."""
        gc.collect()
        for found in gc.get_objects():
            if (what := _of_a_request(found, loaded=loaded)) is not None:
                raise SpentError(f"{what} is still alive")
        gc.freeze()

    def _see_memory(self) -> None:
        if self._driver is not None:
            self._driver.release_memory()
        if self.proc_files.anonymous_bytes() > self._anonymous + _TRIM_BYTES:
            ctypes.CDLL(None).malloc_trim(0)
        # A driver maps what it likes; there is no limit of it to be kept for the next request.
        if self._driver is None and self.proc_files.data_bytes() > self._data + _KEPT_BYTES:
            raise SpentError("memory was not given back")


def _is(setting: Setting, before: Any) -> bool:
    """Return True if a setting is as it was; one that can no longer be read is not."""
    try:
        return bool(setting.get() == before)
    except Exception:
        return False


class Model:
    """The module tree and the objects around it, as they were."""

    def __init__(self, model: Any) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        known: set[int] = set()
        for owner in (model, *model._module.modules(), *_around(model)):
            for found in _dicts_of(vars(owner)):
                if id(found) not in known:
                    known.add(id(found))
                    self._dicts.append((found, dict.copy(found)))
                    lists = [value for value in dict.values(found) if type(value) is list]
                    self._lists += [(value, list(value)) for value in lists]
        self._tokenizer = Tokenizer(getattr(model, "tokenizer", None))
        self._tensors = [
            (each, each.requires_grad, each.data_ptr(), each.dtype, each.shape, dict(vars(each)))
            for each in _tensors(model._module)
        ]

    def restore(self) -> None:
        """Restore the module tree and the objects around it.

        Raises:
            SpentError: if a tensor is another, or the tokenizer.
        """
        for now, before in self._dicts:
            if not _same(now, before):
                dict.clear(now)
                dict.update(now, before)
        for items, those_before in self._lists:
            items[:] = those_before
        self._tokenizer.restore()
        for tensor, trains, address, dtype, shape, attributes in self._tensors:
            if (tensor.data_ptr(), tensor.dtype, tensor.shape) != (address, dtype, shape):
                raise SpentError("a weight was replaced")
            if not _same(vars(tensor), attributes):
                raise SpentError("a weight has other attributes")
            if tensor.is_leaf is False or tensor._backward_hooks:
                raise SpentError("a weight belongs to a graph")
            if tensor.requires_grad is not trains:
                tensor.requires_grad_(trains)
            tensor.grad = None


class Tokenizer:
    """The state of a tokenizer that is not Python's (`tokenizers`)."""

    def __init__(self, tokenizer: Any) -> None:
        inner = getattr(tokenizer, "_tokenizer", None)
        self._inner: Any = inner if hasattr(inner, "get_vocab_size") else None
        if self._inner is None:
            return
        self._state = self._look()
        self._padding, self._truncation = self._inner.padding, self._inner.truncation

    def _look(self) -> list[Any]:
        inner: Any = self._inner
        parts = (inner.normalizer, inner.pre_tokenizer, inner.post_processor, inner.decoder)
        return [
            inner.get_vocab_size(with_added_tokens=True),
            {number: str(token) for number, token in inner.get_added_tokens_decoder().items()},
            [None if part is None else part.__getstate__() for part in parts],
            [getattr(inner.model, name, None) for name in ("dropout", "unk_token", "fuse_unk")],
            inner.encode_special_tokens,
        ]

    def restore(self) -> None:
        """Restore the tokenizer.

        Raises:
            SpentError: if it knows other tokens, or reads text otherwise.
        """
        inner = self._inner
        if inner is None:
            return
        if inner.padding != self._padding:
            inner.enable_padding(**self._padding) if self._padding else inner.no_padding()
        if inner.truncation != self._truncation:
            if self._truncation:
                inner.enable_truncation(**self._truncation)
            else:
                inner.no_truncation()
        if self._look() != self._state:
            raise SpentError("the tokenizer was changed")


def _around(model: Any) -> Iterator[Any]:
    """The configurations of the model, and its tokenizer, as far as they are Python's."""
    module = model._module
    tokenizer = getattr(model, "tokenizer", None)
    for owner in (module, model):
        for name in ("config", "generation_config", "interleaver", "_interleaver"):
            found = getattr(owner, name, None)
            if type(getattr(found, "__dict__", None)) is dict:
                yield found
    if type(getattr(tokenizer, "__dict__", None)) is dict:
        yield tokenizer


def _dicts_of(members: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """A namespace and the dictionaries in it: parameters, buffers, hooks."""
    yield members
    for value in members.values():
        if issubclass(type(value), dict):
            yield value


def _same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return dict.__len__(now) == len(before) and all(
        dict.get(now, name, _ABSENT) is value for name, value in before.items()
    )


_ABSENT = object()


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


@dataclass(frozen=True, slots=True)
class _Whole:
    """Whole pages of one tensor, and which of them were this process's own before."""

    start: int
    end: int
    own: Any


class Weights:
    """The weights in this process's memory, and how to see that nothing was written to them.

    Pages that only a tensor lies in tell by themselves; of what shares its page with other things, and of
    pages that were this process's own before, there is a copy. Weights on GPUs are their owner's to verify.
    """

    def __init__(self, module: torch.nn.Module, proc_files: ProcFiles) -> None:
        self._proc_files = proc_files
        self._whole: list[_Whole] = []
        self._copies: list[tuple[int, bytes]] = []
        for start, end in _merged(_ranges(_tensors(module))):
            first, last = (
                -(-start // mmap.PAGESIZE) * mmap.PAGESIZE,
                end // mmap.PAGESIZE * mmap.PAGESIZE,
            )
            if last <= first:
                self._copy(start, end)
                continue
            self._copy(start, first)
            self._copy(last, end)
            own = proc_files.own_pages(first, last)
            for page in own.nonzero()[0].tolist():
                at = first + page * mmap.PAGESIZE
                self._copy(at, at + mmap.PAGESIZE)
            self._whole.append(_Whole(first, last, own))

    def _copy(self, start: int, end: int) -> None:
        if end > start:
            self._copies.append((start, content(start, end - start)))

    def see(self) -> None:
        """See that no weight was written to.

        Raises:
            SpentError: if one was.
        """
        for whole in self._whole:
            if (self._proc_files.own_pages(whole.start, whole.end) & ~whole.own).any():
                raise SpentError("a weight was written to")
        for start, before in self._copies:
            if content(start, len(before)) != before:
                raise SpentError("a weight was written to")


def _ranges(tensors: list[torch.Tensor]) -> Iterator[tuple[int, int]]:
    for tensor in tensors:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if storage.nbytes():
                yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _merged(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join what overlaps or touches."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _descriptors() -> list[tuple[int, ...] | None]:
    """Return what each descriptor is that this process may have."""
    found: list[tuple[int, ...] | None] = []
    for fd in range(_MOST_DESCRIPTORS):
        try:
            facts = os.fstat(fd)
        except OSError:
            found.append(None)
        else:
            found.append((facts.st_dev, facts.st_ino, facts.st_mode, os.get_blocking(fd)))
    return found


_MOST_DESCRIPTORS = 256


def _start_threads(model: Any) -> None:
    """Start those threads of libraries that honest requests start, and that stay."""
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()
    with contextlib.suppress(Exception):
        # A text of its own is tokenized by the caller's thread, several by a pool of theirs.
        model.tokenizer(["one", "two"])


def _of_a_library(module: object) -> bool:
    """Return True for a module that Python loaded from where the server's packages lie."""
    if not isinstance(module, types.ModuleType):
        return False
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if origin in ("built-in", "frozen"):
        return True
    return isinstance(origin, str) and origin.startswith(_libraries())


def _libraries() -> tuple[str, ...]:
    named = (sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib"))
    return tuple(f"{os.path.normpath(folder)}/" for folder in (*named, *sys.path) if folder)


def _of_a_request(found: Any, *, loaded: bool) -> str | None:
    """Say what an object is that only a request can have made; None for what libraries keep, too.

    `loaded`: libraries came with the request, whose functions and classes are as new as its own.
    """
    kind = type(found)
    if kind is types.FunctionType:
        file = found.__code__.co_filename
        if not file.startswith(_LIBRARIES) and not (loaded and file.startswith("<")):
            return f"the function {found.__qualname__}"
    if issubclass(kind, type) and not (loaded and _of_a_library(sys.modules.get(found.__module__))):
        return f"the class {found.__qualname__}"
    if issubclass(kind, torch.Tensor):
        return "a tensor"
    if kind in _RUNNING:
        return f"a {kind.__name__}"
    if issubclass(kind, weakref.finalize):
        return "a finalizer"
    return None


_RUNNING = frozenset(
    {types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType}
)

_LIBRARIES = _libraries()
