"""Unpickling of requests: only whitelisted globals are looked up, called or changed.

`GlobalResolver` maps the name of a global to an object. `SafeUnpickler` executes the opcodes, and changes
only objects that it made itself.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import importlib
import io
import itertools
import pickle
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import torch
from torch.utils import _contextlib

from ndif.sandbox.protector import placeholders, safe_modules
from ndif.sandbox.protector.guards import AccessGuards
from ndif.sandbox.protector.inheritance import bases, definer, full_name, home
from ndif.sandbox.protector.modules import Modules, is_installed
from ndif.sandbox.protector.names import words
from ndif.sandbox.protector.payload_prefix import (
    CachedPrefix,
    PrefixSpan,
    longest_container,
    without_frames,
)
from ndif.sandbox.protector.placeholders import Discarded, Placeholder
from ndif.sandbox.protector.sent_modules import SentModules
from ndif.sandbox.protector.whitelist import ForbiddenError, Whitelist

_CONTAINERS = (list, dict, set, collections.deque)
_MAPPINGS = (*_CONTAINERS, collections.abc.MutableMapping)
_FIXED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.nn.Module)

_TRANSFORMERS = words("""
    BatchEncoding BatchFeature CharSpan TokenSpan ModelOutput
    Cache CacheLayerMixin LinearAttentionCacheLayerMixin
    PreTrainedConfig PretrainedConfig GenerationConfig
    StoppingCriteria StoppingCriteriaList LogitsProcessor LogitsProcessorList TensorType
""")
"""Classes of transformers whose instances, also of subclasses, a payload may hold."""

_OUTPUT = "transformers.utils.generic.ModelOutput"
"""The base of dataclasses whose constructors, which pickles call, only keep their arguments."""

_TORCH_FUNCTION_MODULES = ("torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special")
"""Values of `__module__` of functions of torch.nn.functional, torch.fft and others."""

_TRACEABLE_METHODS = words("_call __call__ forward generate")
"""Methods of nnsight's models that a trace may run; a request refers to one of them."""

_DENIED_BUILTINS = words("exec eval compile globals locals vars dir")
"""Builtins that inspect their caller or run text: a payload needs none of them."""

_IMPORT_SYSTEM = ("_frozen_importlib", "importlib.machinery", "importlib._bootstrap", "zipimport")
"""Modules of loaders, which travel with the user's modules and are not needed here."""

_CLIENT_SIDE = ("nnsight.intervention.backends", "nnsight.ndif")
"""Parts of nnsight that a script uses around a trace; functions of the script may refer to them."""


class IgnoredObject:
    """A placeholder that accepts any arguments and state, and keeps nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class GlobalResolver:
    """Maps the globals of a pickle to objects.

    Asks the whitelist for permitted names, `Modules` for guarded modules, and `AccessGuards` for attributes
    below them.
    """

    whitelist: Whitelist
    modules: Modules
    guards: AccessGuards
    rebuilders: Mapping[tuple[str, str], Any]
    """Replacements of functions of pickle, cloudpickle, torch and nnsight, by module and name."""

    def resolve(self, module: str, name: str) -> Any:
        """Return the object that a global names, its replacement, or a placeholder if no block may use it.

        Raises:
            ForbiddenError: If no genuine client sends it.
        """
        if (module, name) in self.rebuilders:
            return self.rebuilders[module, name]
        if module == "__builtin__":
            module = "builtins"
        if module == "builtins":
            refused = name in _DENIED_BUILTINS or name.startswith("__")
            if name in self.guards.builtins and not refused:
                return self.guards.builtins[name]
            raise self.forbidden(module, name)
        if module.startswith(_IMPORT_SYSTEM):
            return IgnoredObject
        if module.startswith(_CLIENT_SIDE):
            return _unavailable(module, name)
        if self._is_listed(module, name):
            try:
                return self._load(module, name)
            except (ModuleNotFoundError, AttributeError):
                return placeholders.of_global(module, name, self._refusal(module, name))
        if module in _TORCH_FUNCTION_MODULES and not name.startswith("_"):
            return getattr(importlib.import_module(module), name)
        if module.partition(".")[0] == "nnsight":
            return _unavailable(module, name)
        refusals = []
        for exporter in filter(self._may_export, _exporters(module)):
            try:
                return self._read_path(self.modules.get(exporter), name)
            except (AttributeError, ImportError) as error:
                refusals.append(str(error))
        why = self._refusal(module, name, refusals)
        return placeholders.of_global(module, name, why)

    def _may_export(self, module: str) -> bool:
        is_known = module in safe_modules.NAMES or module in self.modules.users
        return is_known or self.whitelist.find(module) is not None

    def _refusal(self, module: str, name: str, refusals: Sequence[str] = ()) -> str:
        """Return a sentence that explains why a block does not get a global.

        `refusals` are the errors of the modules that might have exported it.
        """
        sentence = f"{module}.{name} is not available on this server"
        root = module.partition(".")[0]
        if module in ("__main__", "__mp_main__"):
            return (
                f"{sentence}: your nnsight sent its name alone, as for a function with functools.cache; "
                "call the function without it"
            )
        if not is_installed(root):
            return self.modules.refusal(module, name)
        entry = self.whitelist.modules.get(root)
        if entry is None:
            return f"{sentence}; you can import: {self.modules.available()}"
        reason = entry.reason(f"{module}.{name}")
        if reason is not None:
            return f"{sentence}: {reason}"
        if any(part.startswith("_") for part in name.split(".")):
            return f"{sentence}: it is private"
        return next((refusal for refusal in refusals if "not available" in refusal), sentence)

    def is_request_independent(self, module: str, name: str) -> bool:
        """Return True if a global resolves to the same object in every request."""
        return (module, name) not in self.rebuilders and module not in self.modules.users

    def forbidden(self, module: str, name: str) -> ForbiddenError:
        """Return an error that names the global and lists permitted values."""
        return ForbiddenError(
            f"{module}.{name} cannot be sent to this server. A request may hold numbers, strings, tensors, "
            "arrays, modules of torch.nn, and functions and classes that your own code defines"
        )

    def _is_listed(self, module: str, name: str) -> bool:
        if name in self.whitelist.deserialization.get(module, ()):
            return True
        packages = itertools.accumulate(module.split("."), "{}.{}".format)
        return any("*" in self.whitelist.deserialization.get(package, ()) for package in packages)

    def _load(self, module: str, name: str) -> Any:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        root = module.partition(".")[0]
        if name in self.whitelist.deserialization.get(module, ()):
            return value
        if isinstance(value, type):
            if root == "nnsight":
                return value
            names = {base.__name__ for base in bases(value) if home(base).startswith(root)}
            if names.intersection(_TRANSFORMERS) or _is_plain_class_of_a_model(value):
                return value
            # A model's wrapper names the classes that loaded it.
            return _unavailable(module, name)
        is_function = root == "nnsight" and isinstance(value, FunctionType)
        if is_function and value.__name__ in _TRACEABLE_METHODS:
            return value
        return _unavailable(module, name)

    def _read_path(self, module: ModuleType, name: str) -> Any:
        return functools.reduce(self.guards.read, name.split("."), module)


def _is_plain_class_of_a_model(cls: type) -> bool:
    """Return True for a class of an architecture's file whose objects unpickle without code of its own.

    Some architectures use such objects instead of transformers' caches.
    """
    module = home(cls)
    return (
        module.startswith("transformers.models.")
        and module.rpartition(".")[2].startswith("modeling_")
        and type(cls) is type
        and all(definer(bases(cls), name) is object for name in ("__new__", "__reduce_ex__"))
        and definer(bases(cls), "__setstate__") is None
    )


def _exporters(module: str) -> Iterator[str]:
    """Yield the modules that may export a module's definitions, itself first: "_heapq", "heapq"."""
    names = [module, *([module.lstrip("_")] if module.startswith("_") else [])]
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:length]) for length in range(len(parts), 0, -1))


_Unpickler: Any = pickle._Unpickler
_FRAME_SIZE = 8
_UINT = struct.Struct("<I")
_BINGET, _LONG_BINGET, _MEMOIZE = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.MEMOIZE[0]
_NONE, _EMPTY_DICT, _EMPTY_LIST = pickle.NONE[0], pickle.EMPTY_DICT[0], pickle.EMPTY_LIST[0]
_SHORT_BINUNICODE, _MARK = pickle.SHORT_BINUNICODE[0], pickle.MARK[0]


def _unavailable(module: str, name: str) -> Placeholder:
    return placeholders.of_global(module, name, f"{module}.{name} is not available on this server")


class SafeUnpickler(_Unpickler):  # type: ignore[misc]
    """An unpickler that changes only objects that it made itself.

    Derived from the Python implementation, because the C one changes objects on its stack unobserved.
    """

    memo: dict[int, Any]

    def __init__(
        self,
        file: io.BytesIO,
        resolver: GlobalResolver,
        persistent: Mapping[str, Any],
        prefix: CachedPrefix | None = None,
    ) -> None:
        """Prepare to decode `file`, in which a container with the bytes of `prefix` is harmless."""
        super().__init__(file)
        self._file = file
        self._resolver = resolver
        self._persistent = persistent
        self._prefix = prefix
        self._held = {id(value) for value in persistent.values()}
        self._modules = SentModules(resolver.guards.is_users_own)

    def load(self) -> Any:
        """Decode the payload; see `pickle.Unpickler`.

        A payload names every module of the model: 16,000 opcodes for 30 layers. The loop itself handles
        five of six opcodes, because a function call for each of them would take twice as long.
        """
        file, dispatch, memo = self._file, self.dispatch, self.memo
        content, position = file.getvalue(), 0
        prefix = range(0) if self._prefix is None else self._prefix.find(content)
        self.read, self.readinto, self.readline = file.read, file.readinto, file.readline
        self.metastack: list[Any] = []
        stack: list[Any] = []
        self.stack = stack
        self.append = stack.append
        self.proto = 0
        try:
            while True:
                key = content[position]
                position += 1
                if key == _BINGET:
                    stack.append(memo[content[position]])
                    position += 1
                elif key == _MEMOIZE:
                    memo[len(memo)] = stack[-1]
                elif key == _EMPTY_DICT:
                    stack.append({})
                elif key == _SHORT_BINUNICODE:
                    end = position + 1 + content[position]
                    stack.append(str(content[position + 1 : end], "utf-8", "surrogatepass"))
                    position = end
                elif key == _MARK:
                    prefix_end = position - 1 in prefix and self._take_prefix(content, position - 1)
                    if prefix_end:
                        position, memo = prefix_end, self.memo
                    else:
                        self.metastack.append(stack)
                        self.stack = stack = []
                        self.append = stack.append
                elif key == _NONE:
                    stack.append(None)
                elif key == _EMPTY_LIST:
                    stack.append([])
                elif key == _LONG_BINGET:
                    stack.append(memo[_UINT.unpack_from(content, position)[0]])
                    position += 4
                else:
                    file.seek(position)
                    dispatch[key](self)
                    position, stack = file.tell(), self.stack
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        except (IndexError, struct.error):
            if position + _UINT.size <= len(content):
                raise  # the payload is malformed, not truncated
            raise EOFError("the pickle has no end") from None

    def _take_prefix(self, content: bytes, start: int) -> int | None:
        """Decode the cached container at once; return the offset after it, or None if this one differs."""
        prefix = self._prefix
        if prefix is None:
            return None
        end = prefix.match(content, start, self.memo, self._persistent)
        if end is None:
            return None
        container, self.memo = prefix.decode(self.memo)
        if isinstance(container, list):
            self._growable().extend(container)
        else:
            target = self._growable(_MAPPINGS)
            for key, value in container.items():
                target[key] = value
        return end

    def _load_frame(self) -> None:
        """Skip the size of a frame, a hint for reading ahead: the whole payload is in memory."""
        self.read(_FRAME_SIZE)

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global; see `GlobalResolver.resolve`."""
        return self._resolver.resolve(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return the server's object of this name."""
        if isinstance(pid, str) and pid in self._persistent:
            return self._persistent[pid]
        raise pickle.UnpicklingError(f"Unknown persistent id: {pid}")

    def _check_changed(self, value: Any) -> None:
        if isinstance(value, _FIXED) or id(value) in self._held:
            raise ForbiddenError(
                f"a request cannot change an object of the class {type(value).__name__}"
            )

    def _load_new_object(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if type(cls) is Placeholder:
            self.append(placeholders.of_object(cls))
        elif isinstance(cls, type) and issubclass(cls, torch.nn.Module):
            self.append(self._modules.make(cls))
        else:
            self.append(cls.__new__(cls, *arguments))

    def _load_build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if type(value) is Placeholder:
            return
        if issubclass(type(value), torch.nn.Module):
            self._modules.fill(value, state)
            return
        self._check_changed(value)
        setstate = getattr(value, "__setstate__", None)
        if setstate is not None:
            setstate(state)
            return
        slots = None
        if isinstance(state, tuple) and len(state) == 2:
            state, slots = state
        if state:
            attributes = value.__dict__
            for key, item in state.items():
                attributes[key] = item
        for key, item in (slots or {}).items():
            if not isinstance(key, str) or (key.startswith("__") and key.endswith("__")):
                raise ForbiddenError(f"a request cannot set the attribute {key!r} of an object")
            setattr(value, key, item)

    def _load_reduce(self) -> None:
        function = self.stack[-2]
        is_constructor = isinstance(function, type) and not issubclass(function, enum.Enum)
        is_of_libraries = is_constructor and home(function).partition(".")[0] in (
            "nnsight",
            "transformers",
        )
        # Such a call runs a constructor, and a model's constructor loads the model.
        if is_of_libraries and _OUTPUT not in map(full_name, bases(function)):
            raise self._resolver.forbidden(function.__module__, f"{function.__qualname__}(...)")
        if type(function) is Placeholder:
            self.stack.pop()
            self.stack[-1] = placeholders.of_object(function)
            return
        try:
            _Unpickler.load_reduce(self)
        except ImportError as error:
            used = placeholders.placeholder_of(error)
            if used is None:
                raise
            # An object whose creation uses a placeholder becomes a placeholder, too.
            self.stack[-1] = placeholders.of_object(used)

    def _load_newobj_ex(self) -> None:
        if type(self.stack[-3]) is Placeholder:
            del self.stack[-2:]
            self.stack[-1] = placeholders.of_object(self.stack[-1])
        else:
            _Unpickler.load_newobj_ex(self)

    def _instantiate(self, cls: Any, arguments: Any) -> None:
        """Make an instance for the opcodes INST and OBJ, older forms of REDUCE."""
        self.append(cls)
        self.append(tuple(arguments))
        self._load_reduce()

    def _load_append(self) -> None:
        value = self.stack.pop()
        self._growable().append(value)

    def _load_appends(self) -> None:
        items = self.pop_mark()
        self._growable().extend(items)

    def _load_additems(self) -> None:
        items = self.pop_mark()
        self._growable().update(items)

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._growable(_MAPPINGS)[key] = value

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        target = self._growable(_MAPPINGS)
        for index in range(0, len(items), 2):
            target[items[index]] = items[index + 1]

    def _growable(self, kinds: tuple[type, ...] = _CONTAINERS) -> Any:
        """Return the object on top of the stack, which is about to get items."""
        value = self.stack[-1]
        if type(value) is Placeholder:
            return Discarded()
        if not isinstance(value, kinds):
            self._check_changed(value)
            if not self._resolver.guards.is_users_own(value):
                raise ForbiddenError(
                    f"a request cannot add items to an object of the class {type(value).__name__}"
                )
        return value

    def _load_extension(self) -> None:
        raise ForbiddenError("a request cannot hold pickle extension codes (copyreg.add_extension)")

    dispatch: ClassVar[dict[int, Any]] = {
        **_Unpickler.dispatch,
        pickle.FRAME[0]: _load_frame,
        pickle.NEWOBJ[0]: _load_new_object,
        pickle.BUILD[0]: _load_build,
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ_EX[0]: _load_newobj_ex,
        pickle.APPEND[0]: _load_append,
        pickle.APPENDS[0]: _load_appends,
        pickle.ADDITEMS[0]: _load_additems,
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.EXT1[0]: _load_extension,
        pickle.EXT2[0]: _load_extension,
        pickle.EXT4[0]: _load_extension,
    }


def cache_prefix(
    payload: bytes, resolver: GlobalResolver, persistent: Mapping[str, Any]
) -> CachedPrefix | None:
    """Return the part that requests share with `payload`, one of the server's own; None if unsuitable."""
    payload = without_frames(payload)
    span = longest_container(payload)
    if span is None:
        return None
    recorder = _PrefixRecorder(span, io.BytesIO(payload), resolver, persistent)
    recorder.load()
    if not recorder.is_reusable:
        return None
    prefix = CachedPrefix.of(payload, span, recorder.memo, recorder.used_objects, recorder.globals)
    try:
        prefix.decode_ahead()
    except Exception:  # not decodable on its own: it is decoded in each payload
        return None
    prefix.forget()
    return prefix


class _PrefixRecorder(SafeUnpickler):
    """Decodes a payload up to the end of a container, and records that container's dependencies."""

    def __init__(self, span: PrefixSpan, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._span = span
        self.used_objects: dict[str, Any] = {}
        """Persistent objects that the container refers to."""
        self.globals: dict[tuple[str, str], Any] = {}
        """Globals that the container names."""
        self.is_reusable = True
        """False if another decoder or request would make other objects of the container."""

    def persistent_load(self, pid: Any) -> Any:
        value = super().persistent_load(pid)
        if self._span.contains(self._file.tell()):
            self.used_objects[pid] = value
        return value

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name)
        if self._span.contains(self._file.tell()):
            self.globals[module, name] = value
            if not self._resolver.is_request_independent(module, name):
                self.is_reusable = False
        return value

    def _load_new_object(self) -> None:
        cls = self.stack[-2]
        # `SafeUnpickler` makes objects of both kinds in its own way, unlike the decoder in C.
        if not isinstance(cls, type) or issubclass(cls, torch.nn.Module):
            self._mark_unreusable()
        super()._load_new_object()

    def _load_build(self) -> None:
        if isinstance(self.stack[-2], Placeholder | torch.nn.Module):
            self._mark_unreusable()
        super()._load_build()

    def _growable(self, kinds: tuple[type, ...] = _CONTAINERS) -> Any:
        if type(self.stack[-1]) is Placeholder:
            self._mark_unreusable()
        return super()._growable(kinds)

    def _mark_unreusable(self) -> None:
        if self._span.contains(self._file.tell()):
            self.is_reusable = False

    def _load_appends(self) -> None:
        self._stop_at_the_end()
        super()._load_appends()

    def _load_setitems(self) -> None:
        self._stop_at_the_end()
        super()._load_setitems()

    def _stop_at_the_end(self) -> None:
        if self._file.tell() == self._span.end:
            raise pickle._Stop(None)  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = {
        **SafeUnpickler.dispatch,
        pickle.NEWOBJ[0]: _load_new_object,
        pickle.BUILD[0]: _load_build,
        pickle.APPENDS[0]: _load_appends,
        pickle.SETITEMS[0]: _load_setitems,
    }


def load_tensors(content: bytes) -> Any:
    """Load tensors that torch serialized within a payload, without running anything."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ForbiddenError(
            "the bytes of torch.save in this request hold more than tensors, numbers and strings; send the "
            "tensors themselves"
        ) from error


def reconstruct(cls: type, base: type, state: Any) -> Any:
    """Replace `copyreg._reconstructor`: make an instance without running its constructor."""
    placeholders.check([cls, base])
    if not isinstance(cls, type):
        raise ForbiddenError("copyreg._reconstructor takes a class")
    return copyreg._reconstructor(cls, base, state)  # type: ignore[attr-defined]


def new_object(cls: type, *arguments: Any) -> Any:
    """Replace `copyreg.__newobj__`."""
    placeholders.check([cls])
    if not isinstance(cls, type):
        raise ForbiddenError("copyreg.__newobj__ takes a class")
    return cls.__new__(cls, *arguments)


def encode(text: str, encoding: str) -> bytes:
    """Replace `_codecs.encode`, by which pickle protocol 2 writes bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise ForbiddenError("_codecs.encode takes the encoding latin-1 in a request")
    return text.encode(encoding)


def compile_pattern(pattern: str | bytes, flags: int) -> re.Pattern[Any]:
    """Replace `re._compile`, which the pickle of a pattern calls."""
    placeholders.check([pattern, flags])
    return re.compile(pattern, flags)


def bound(function: Any, owner: Any) -> MethodType:
    """Replace `types.MethodType`."""
    placeholders.check([function, owner])
    if not isinstance(function, FunctionType):
        raise ForbiddenError("types.MethodType takes a function")
    return MethodType(function, owner)


def rebuild_from_type(function: Any, kind: type, arguments: Any, state: Any) -> torch.Tensor:
    """Replace `torch._tensor._rebuild_from_type_v2`: make a tensor of a subclass, or with attributes."""
    tensor: torch.Tensor = function(*arguments)
    if not isinstance(tensor, torch.Tensor) or not issubclass(kind, torch.Tensor):
        raise ForbiddenError("torch._tensor._rebuild_from_type_v2 makes a tensor")
    if type(tensor) is not kind:
        tensor = tensor.as_subclass(kind)
    if isinstance(state, tuple):
        state = state[0]
    for name, value in (state or {}).items():
        if not name.startswith("__"):
            tensor.__dict__[name] = value
    return tensor


def clone_context(context: Any) -> Any:
    """Replace the `clone` method of torch's context decorators, such as `torch.no_grad()`."""
    if not isinstance(context, _contextlib._DecoratorContextManager):
        raise TypeError("this method belongs to torch.no_grad and its kind")
    return context.clone()  # type: ignore[no-untyped-call]
