"""Serialization of a block's saved values for its client, in the format of `torch.save`.

A small result is serialized once, into memory. A large result is serialized twice, so that memory holds no
copy of it: once to measure its size, which a zstd frame states at its beginning, and once into a stream.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import importlib
import io
import operator
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import cloudpickle
import torch
import zstandard

from ndif.runtime.raw_frame import RawFrame
from ndif.sizes import format_size

_PROTOCOL = 4
"""The first pickle protocol that writes `bytes` without encoding them."""

_SMALL_LEVEL, _COMPRESS_LEVEL = 3, 1
_SAMPLE = 1 << 18
_MAX_RATIO = 0.9
"""Compression is worthwhile if a sample shrinks below this fraction of its size."""
_CHUNK = 1 << 20


class ResultTooLargeError(Exception):
    """The result is larger than the limit of the server or the API key."""


class ResultNotStoredError(Exception):
    """The server's disk is full or failed; the message is a sentence for the user."""


class _HostFile(io.FileIO):
    """A file of the host that keeps the OSError of a failed write."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise

    def write_parts(self, parts: Sequence[Any]) -> None:
        """Write several buffers completely and in order."""
        try:
            written = os.writev(self.fileno(), parts)
        except OSError as error:
            self.failure = error
            raise
        for part in parts:
            view = memoryview(part)[written:]
            written = max(0, written - len(part))
            while view:
                view = view[self.write(view) :]


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[_HostFile]:
    """Open a file of the host; raise ResultNotStoredError only if its disk fails."""
    raw = _HostFile(fd, "wb", closefd=False)
    try:
        yield raw
    except Exception as error:  # torch's writer turns an OSError into a RuntimeError
        if raw.failure is None:
            raise
        is_full = raw.failure.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ResultNotStoredError(
            "The block ran, but the server's disk "
            + ("is full" if is_full else f"failed ({raw.failure.strerror})")
            + ", so its result could not be stored. The block has no error: send it again later, or "
            "notify the server's operator."
        ) from error


class _Meter(io.RawIOBase):
    """A file that counts its bytes, and keeps them if they are at most `keep`."""

    def __init__(self, limit: int, keep: int) -> None:
        self.size = 0
        self.kept: io.BytesIO | None = io.BytesIO()
        self.sample = b""
        self._limit = limit
        self._keep = keep

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.size += len(view)
        if self.size > self._limit:
            raise ResultTooLargeError
        if len(view) >= len(self.sample) and len(self.sample) < _SAMPLE:
            self.sample = bytes(view[:_SAMPLE])
        if self.kept is not None:
            if self.size <= self._keep:
                self.kept.write(view)
            else:
                self.kept = None
        return len(view)


class ClientDefinitions(Protocol):
    """Facts about the client's classes and functions in one request."""

    def is_from_request(self, value: type | types.FunctionType) -> bool:
        """Return True if the request brought `value`: its client has an object of that name."""

    def original(self, value: object) -> tuple[str, str] | None:
        """Return the module and name of the object that `value` replaces in a block, or None."""

    def unguarded(self, function: types.FunctionType) -> types.FunctionType:
        """Return a block's function without the policy's changes, as on its client."""


class TrustedDefinitions:
    """The `ClientDefinitions` of requests without a policy."""

    def __init__(self) -> None:
        self._functions: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()

    def record(self, function: types.FunctionType) -> None:
        """Record a function that a request brought."""
        self._functions.add(function)

    def is_from_request(self, value: type | types.FunctionType) -> bool:
        if isinstance(value, types.FunctionType):
            return value in self._functions
        # Compared by identity: a metaclass may define `__eq__`.
        classes = [*cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()]
        return any(cls is value for cls in classes)

    def original(self, value: object) -> None: ...

    def unguarded(self, function: types.FunctionType) -> types.FunctionType:
        return function


trusted = TrustedDefinitions()
"""The definitions of this process's trusted requests."""


class Result:
    """The saved values of one request: their bytes if small, else only their serialized size."""

    def __init__(
        self,
        saves: Mapping[str, Any],
        max_bytes: int,
        max_inline: int,
        definitions: ClientDefinitions = trusted,
    ) -> None:
        """Serialize once, keep bytes up to `max_inline`; above `max_bytes` raise ResultTooLargeError."""
        self._saves = dict(saves)
        self._pickling = _pickling(definitions)
        meter = _Meter(max_bytes, max_inline)
        try:
            self._save(meter)
        except (ResultTooLargeError, RuntimeError) as error:
            # torch's writer turns the exception of the meter into a RuntimeError.
            if meter.size <= max_bytes:
                raise
            raise ResultTooLargeError(
                f"The saved values take more than {format_size(max_bytes)}, the limit for a result "
                "(NDIF_MAX_RESULT_BYTES, or a limit of your API key). Save fewer values, or reduce them "
                "inside the trace: a slice, a mean, .to(torch.bfloat16)."
            ) from error
        self.size = meter.size
        """Bytes before compression."""
        self.content = meter.kept.getvalue() if meter.kept is not None else None
        self._sample = meter.sample

    def compressed(self) -> bytes:
        """Return a small result as one zstd frame."""
        assert self.content is not None  # noqa: S101 - callers compress only small results in memory
        return zstandard.ZstdCompressor(level=_SMALL_LEVEL).compress(self.content)

    def write(self, fd: int) -> None:
        """Stream the uncompressed result into an open file."""
        with _opened(fd) as raw, io.BufferedWriter(raw) as file:
            self._save(file)

    def write_frame(self, fd: int) -> None:
        """Stream the result into an open file as one zstd frame of uncompressed blocks."""
        with _opened(fd) as raw:
            frame = RawFrame(raw.write_parts, self.size)
            self._save(frame)
            frame.finish()

    def write_compressed(self, fd: int, threads: int) -> None:
        """Stream the result into an open file as one compressed zstd frame."""
        compressor = zstandard.ZstdCompressor(level=_COMPRESS_LEVEL, threads=threads)
        with (
            _opened(fd) as raw,
            io.BufferedWriter(raw) as file,
            compressor.stream_writer(
                file, size=self.size, write_size=_CHUNK, closefd=False
            ) as stream,
        ):
            self._save(stream)

    def _save(self, file: Any) -> None:
        torch.save(self._saves, file, pickle_module=self._pickling, pickle_protocol=_PROTOCOL)

    def compresses(self) -> bool:
        """Return True if a sample of the result compresses well.

        Measured on bfloat16 activations: level 1 saves 22 % at 588 MB/s per thread; levels up to 6 save no
        more, at a tenth of that speed. float32 noise saves 8 %, which pays off on no network.
        """
        compressed = zstandard.ZstdCompressor(level=_COMPRESS_LEVEL).compress(self._sample)
        return len(compressed) < _MAX_RATIO * len(self._sample)


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that refers to the client's own classes by name and drops unused parts of storages."""

    definitions: ClientDefinitions
    from_request: dict[int, tuple[Any, bool]]
    """First answers of `is_from_request`, by id: it returns True once a class was pickled by value."""

    def reducer_override(self, obj: Any) -> Any:
        original = self.definitions.original(obj)
        if original is not None:
            return _reference(*original)
        if obj is dataclasses.MISSING:
            return _reference("dataclasses", "MISSING")
        if isinstance(obj, torch.Tensor):
            return _reduce_tensor(obj)
        if isinstance(obj, torch.nn.Module):
            return _reduce_module(obj)
        if isinstance(obj, type | types.FunctionType):
            if _belongs_to_server(obj):
                raise pickle.PicklingError(f"{obj.__name__!r} is a part of the server")
            if not cloudpickle.cloudpickle._should_pickle_by_reference(obj):
                name = self._clients_name(obj)
                if name is not None:
                    return name
                if isinstance(obj, type) and _is_named_tuple(obj):
                    return _reduce_named_tuple(obj)
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        return super()._dynamic_function_reduce(self.definitions.unguarded(func))

    def _clients_name(self, obj: type | types.FunctionType) -> Any:
        """Return a reference to the client's own class or function; None if the client does not have it.

        Sent back by value, a class would be a different class for the client, and `isinstance` would fail.
        """
        module, qualname = obj.__module__, obj.__qualname__
        if not module or module == "builtins" or "<" in qualname:
            # cloudpickle itself handles builtin classes that have no name in `builtins`.
            return None
        return (
            _reference(module, qualname)
            if _module_has(module, qualname) or self._is_from_request(obj)
            else None
        )

    def _is_from_request(self, obj: type | types.FunctionType) -> bool:
        entry = self.from_request.setdefault(id(obj), (obj, self.definitions.is_from_request(obj)))
        return entry[1]


def _pickling(definitions: ClientDefinitions) -> Any:
    """Return a module for `torch.save` that pickles the values of one request."""
    module: Any = types.ModuleType("pickling")
    module.Pickler = type(
        "Pickler", (_ResultPickler,), {"definitions": definitions, "from_request": {}}
    )
    return module


def _module_has(module: str, qualname: str) -> bool:
    """Return True if an imported module has an object of this name, such as a function's wrapper."""
    try:
        functools.reduce(getattr, qualname.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return False
    return module != "__main__"


def _belongs_to_server(obj: type | types.FunctionType) -> bool:
    return str(obj.__module__).partition(".")[0] == "ndif"


def _reference(module: str, qualname: str) -> Any:
    """Return the reduction of an object that the client has in a module."""
    return operator.attrgetter(qualname), (_Module(module),)


def _is_named_tuple(cls: type) -> bool:
    """Return True if `collections.namedtuple` alone could have made the class."""
    own = vars(cls)
    return (
        cls.__bases__ == (tuple,)
        and type(own.get("_fields")) is tuple
        and getattr(own.get("__repr__"), "__module__", None) == "collections"
        and {*own} <= {*_NAMED_TUPLE_ATTRIBUTES, *own["_fields"]}
    )


_named_tuple: Callable[..., Any] = collections.namedtuple
_NAMED_TUPLE_ATTRIBUTES = frozenset(
    (*vars(_named_tuple("_", [])), "__annotations__", "__orig_bases__")
)
"""Attributes of every named tuple class, besides its fields."""


def _reduce_named_tuple(cls: Any) -> Any:
    """Reduce a named tuple to the call that creates it: its methods are bytecode of one Python version."""
    defaults = [cls._field_defaults[name] for name in cls._fields if name in cls._field_defaults]
    options = {"defaults": defaults, "module": cls.__module__}
    return functools.partial(_named_tuple, cls.__name__, cls._fields, **options), ()


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Reduce a view without the rest of its storage: `logits[:, -1]` without all of `logits`."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        needed = tensor.numel() * tensor.element_size()
        if tensor.untyped_storage().nbytes() > 2 * needed:
            small = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return small.__reduce_ex__(_PROTOCOL)
    return NotImplemented


def _reduce_module(module: torch.nn.Module) -> Any:
    """Reduce a module of the model without the attributes and hooks that nnsight 0.6 and 0.7 added here."""
    own = vars(module)
    if "__nnsight_forward__" not in own:
        return NotImplemented
    reduced: Any = module.__reduce_ex__(_PROTOCOL)
    state = {
        name: _without_nnsight_hooks(value) if name.endswith("_hooks") else value
        for name, value in own.items()
        if name not in _NNSIGHT_ATTRIBUTES and not name.startswith("__nnsight_")
    }
    return (*reduced[:2], state, *reduced[3:])


_NNSIGHT_ATTRIBUTES = ("forward", "__path__", "__source_accessor__", "_persistent_id")
"""Attributes that nnsight adds to a module, besides attributes that begin with `__nnsight_`."""


def _without_nnsight_hooks(hooks: Any) -> Any:
    if not isinstance(hooks, Mapping):
        return hooks
    return collections.OrderedDict(
        (number, hook)
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("nnsight.")
    )


class _Module:
    """A module that pickles as an import by name in the client."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[[str], types.ModuleType], tuple[str]]:
        return importlib.import_module, (self.name,)


torch.serialization.set_crc32_options(False)
"""TCP has its own checksums, and torch.load ignores the checksums of the zip archive."""
