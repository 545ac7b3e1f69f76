"""Reading a payload: nothing is looked up, called or changed but what the whitelist lists for it."""

from __future__ import annotations

import collections
import copyreg
import enum
import importlib
import io
import pickle
import struct
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import torch

from ndif.sandbox.protector.guards import Guards
from ndif.sandbox.protector.modules import Modules, UnauthorizedModule, UserModule
from ndif.sandbox.protector.passages import Passage
from ndif.sandbox.protector.whitelist import Whitelist

_Rebuilders = Mapping[tuple[str, str], Any]

_CONTAINERS = (list, dict, set, collections.deque)
_FIXED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.nn.Module)

_TRANSFORMERS = (
    "BatchEncoding",
    "BatchFeature",
    "ModelOutput",
    "PreTrainedConfig",
    "PretrainedConfig",
    "GenerationConfig",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "LogitsProcessor",
    "LogitsProcessorList",
    "TensorType",
)
"""Classes of transformers of which objects, and objects of subclasses, may be in a payload."""

_TORCHS_FUNCTIONS = ("torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special")
"""Where functions of torch.nn.functional, torch.fft, … say that they are from."""

_TRACED = frozenset({"_call", "__call__", "forward", "generate"})
"""Methods of nnsight's models that a trace may run: a request refers to the one it wants."""

_DANGEROUS = frozenset(
    {"exec", "eval", "compile", "globals", "locals", "vars", "__import__", "dir"}
)
"""Builtins that look at who calls them, or run text: of no use in a payload."""


_IMPORT_SYSTEM = ("_frozen_importlib", "importlib.machinery", "importlib._bootstrap", "zipimport")
"""How a module of the user's was loaded: it comes with the module, and nothing here needs it."""

_CLIENTS_OWN = ("nnsight.intervention.backends", "nnsight.ndif")
"""Parts of nnsight that a user's script uses around a trace. Its functions may refer to them."""


class Inert:
    """Stands for an object of which nothing is kept."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class ForbiddenError(pickle.UnpicklingError):
    """The payload holds what it may not; the message names it."""


class Finder:
    """What a global of a pickle stands for."""

    def __init__(
        self, whitelist: Whitelist, modules: Modules, guards: Guards, rebuilders: _Rebuilders
    ) -> None:
        self._whitelist = whitelist
        self._modules = modules
        self._guards = guards
        self._rebuilders = rebuilders

    def find(self, module: str, name: str) -> Any:
        """The object, or what stands for it.

        Raises:
            ForbiddenError: if a payload may not hold it.
        """
        if (module, name) in self._rebuilders:
            return self._rebuilders[module, name]
        if module == "__builtin__":
            module = "builtins"
        if module in ("builtins", "copy_reg"):
            if module == "builtins" and name in self._guards.builtins and name not in _DANGEROUS:
                if name.startswith("__"):
                    raise self.forbidden(module, name)
                return self._guards.builtins[name]
        elif module.startswith(_IMPORT_SYSTEM):
            return Inert
        elif module.startswith(_CLIENTS_OWN):
            return _refused(module, name)
        elif self._listed(module, name):
            return self._load(module, name)
        elif module in _TORCHS_FUNCTIONS and not name.startswith("_"):
            return getattr(importlib.import_module(module), name)
        elif module in self._modules.users:
            return self._walk(self._modules.users[module], module, name)
        elif self._whitelist.find(module) is not None and module.partition(".")[0] != "nnsight":
            return self._walk(self._modules.get(module), module, name)
        raise self.forbidden(module, name)

    def lasts(self, module: str, name: str) -> bool:
        """Whether what a global stands for is the same for every request."""
        return (module, name) not in self._rebuilders and module not in self._modules.users

    def forbidden(self, module: str, name: str) -> ForbiddenError:
        """The error that names the class."""
        return ForbiddenError(
            f"{module}.{name} cannot be sent to this server. A request may hold numbers, texts, tensors, "
            "arrays, and what your own code defines"
        )

    def _listed(self, module: str, name: str) -> bool:
        if name in self._whitelist.deserialization.get(module, ()):
            return True
        parts = module.split(".")
        for length in range(len(parts), 0, -1):
            if "*" in self._whitelist.deserialization.get(".".join(parts[:length]), ()):
                return True
        return False

    def _load(self, module: str, name: str) -> Any:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        root = module.partition(".")[0]
        if name in self._whitelist.deserialization.get(module, ()):
            return found
        if isinstance(found, type):
            if root == "nnsight":
                return found
            bases = {each.__name__ for each in found.__mro__ if each.__module__.startswith(root)}
            if bases.intersection(_TRANSFORMERS):
                return found
            # A model's wrapper names the classes that it was loaded by.
            return _refused(module, name)
        if root == "nnsight" and isinstance(found, FunctionType) and found.__name__ in _TRACED:
            return found
        raise self.forbidden(module, name)

    def _walk(self, module: ModuleType, path: str, name: str) -> Any:
        found: Any = module
        try:
            for part in name.split("."):
                found = self._guards.read(found, part)
        except (AttributeError, ImportError) as error:
            raise ForbiddenError(f"{path}.{name} cannot be sent to this server: {error}") from None
        return found


_Unpickler: Any = pickle._Unpickler
_FRAME_SIZE = 8
_UINT = struct.Struct("<I")
_TELLING = 64
"""Bytes by which the beginning of a passage is known."""

_BINGET, _LONG_BINGET, _MEMOIZE = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.MEMOIZE[0]
_NONE, _EMPTY_DICT, _EMPTY_LIST = pickle.NONE[0], pickle.EMPTY_DICT[0], pickle.EMPTY_LIST[0]
_SHORT_BINUNICODE, _MARK = pickle.SHORT_BINUNICODE[0], pickle.MARK[0]


def _refused(module: str, name: str) -> UnauthorizedModule:
    """What may be named in a payload and not used."""
    path = f"{module}.{name}"
    return UnauthorizedModule(path, f"{path} is not available on this server")


class SafeUnpickler(_Unpickler):  # type: ignore[misc]
    """An unpickler that changes only what it made itself.

    It is the one written in Python: what the other does to the objects of its stack cannot be watched.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def __init__(
        self,
        file: io.BytesIO,
        finder: Finder,
        persistent: Mapping[str, Any],
        foreseen: list[Passage] | None = None,
    ) -> None:
        """`foreseen`: what may be in the payload and has been read before; who uses it takes it away."""
        super().__init__(file)
        self._file = file
        self._finder = finder
        self._persistent = persistent
        self._foreseen = foreseen or []
        self._held = {id(value) for value in persistent.values()}

    def load(self) -> Any:
        """See `pickle.Unpickler`.

        A payload names every module of the model: 16,000 opcodes for 30 layers, five of six of them one
        of those that are run here. By a call each, as the others are, it would take twice as long; and
        none, where it was foreseen.
        """
        file, dispatch, memo = self._file, self.dispatch, self.memo
        content, position = file.getvalue(), 0
        passage = self._expected(content)
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
                    if position == passage and (after := self._skip(content, passage)) is not None:
                        position = after
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
                raise  # it is not the end that is missing
            raise EOFError("the pickle has no end") from None

    def _expected(self, content: bytes) -> int:
        """Where, behind its mark, a foreseen passage may begin; 0 if there is none."""
        if not self._foreseen:
            return 0
        return content.find(self._foreseen[0].content[:_TELLING]) + 1

    def _skip(self, content: bytes, position: int) -> int | None:
        """Take what a foreseen passage makes; where it ends, or None if it is another."""
        passage = self._foreseen[0]
        end = passage.end(content, position - 1)
        if end is None or not passage.means_the_same(self.memo, self._persistent):
            return None
        # What it makes is one request's own.
        self._foreseen.clear()
        self.memo.update(enumerate(passage.memo, passage.numbered))
        self._grow(self.stack[-1]).extend(passage.items)
        return end

    def _load_frame(self) -> None:
        """Frames tell how much to read at once, and nothing of what is in them."""
        self.read(_FRAME_SIZE)

    dispatch[pickle.FRAME[0]] = _load_frame

    def find_class(self, module: str, name: str) -> Any:
        """See `Finder.find`."""
        return self._finder.find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """An object of the server's.

        Raises:
            UnpicklingError: if there is none of this name.
        """
        if isinstance(pid, str) and pid in self._persistent:
            return self._persistent[pid]
        raise pickle.UnpicklingError(f"Unknown persistent id: {pid}")

    def _check_changed(self, value: Any) -> None:
        if isinstance(value, _FIXED) or id(value) in self._held:
            raise ForbiddenError(
                f"an object of {type(value).__name__} cannot be changed by what is sent to this server"
            )

    def _load_build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        self._check_changed(value)
        setstate = getattr(value, "__setstate__", None)
        if setstate is not None:
            setstate(state)
            return
        slots = None
        if isinstance(state, tuple) and len(state) == 2:
            state, slots = state
        if state:
            own = value.__dict__
            for key, each in state.items():
                own[key] = each
        for key, each in (slots or {}).items():
            if not isinstance(key, str) or (key.startswith("__") and key.endswith("__")):
                raise ForbiddenError(f"the attribute {key!r} cannot be set by what is sent")
            setattr(value, key, each)

    dispatch[pickle.BUILD[0]] = _load_build

    def _load_reduce(self) -> None:
        function = self.stack[-2]
        makes = isinstance(function, type) and not issubclass(function, enum.Enum)
        # To make one runs what its constructor does, which for a model is to load it.
        if makes and function.__module__.partition(".")[0] in ("nnsight", "transformers"):
            raise self._finder.forbidden(function.__module__, f"{function.__qualname__}(...)")
        _Unpickler.load_reduce(self)

    dispatch[pickle.REDUCE[0]] = _load_reduce

    def _load_append(self) -> None:
        value = self.stack.pop()
        self._grow(self.stack[-1]).append(value)

    dispatch[pickle.APPEND[0]] = _load_append

    def _load_appends(self) -> None:
        items = self.pop_mark()
        self._grow(self.stack[-1]).extend(items)

    dispatch[pickle.APPENDS[0]] = _load_appends

    def _load_additems(self) -> None:
        items = self.pop_mark()
        self._grow(self.stack[-1]).update(items)

    dispatch[pickle.ADDITEMS[0]] = _load_additems

    def _grow(self, value: Any) -> Any:
        if not isinstance(value, _CONTAINERS):
            self._check_changed(value)
            if not self._finder._guards.owns(value):
                raise ForbiddenError(f"an object of {type(value).__name__} cannot be filled")
        return value

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._grow_mapping(self.stack[-1])[key] = value

    dispatch[pickle.SETITEM[0]] = _load_setitem

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        target = self._grow_mapping(self.stack[-1])
        for index in range(0, len(items), 2):
            target[items[index]] = items[index + 1]

    dispatch[pickle.SETITEMS[0]] = _load_setitems

    def _grow_mapping(self, value: Any) -> Any:
        return value if isinstance(value, collections.abc.MutableMapping) else self._grow(value)

    def _load_extension(self) -> None:
        raise ForbiddenError("extension codes cannot be sent to this server")

    dispatch[pickle.EXT1[0]] = _load_extension
    dispatch[pickle.EXT2[0]] = _load_extension
    dispatch[pickle.EXT4[0]] = _load_extension


def load_tensors(content: bytes) -> Any:
    """torch's own bytes within a payload: tensors, numbers and texts, and nothing that runs.

    Raises:
        ForbiddenError: if there is more in them.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ForbiddenError("what was saved by torch and sent is more than tensors") from error


def reconstruct(cls: type, base: type, state: Any) -> Any:
    """`copyreg._reconstructor`, for objects that are made without running anything of theirs."""
    if not isinstance(cls, type):
        raise ForbiddenError("what is to be rebuilt is no class")
    return copyreg._reconstructor(cls, base, state)  # type: ignore[attr-defined]


def new_object(cls: type, *arguments: Any) -> Any:
    """`copyreg.__newobj__`."""
    if not isinstance(cls, type):
        raise ForbiddenError("what is to be made is no object of a class")
    return cls.__new__(cls, *arguments)


def encode(text: str, encoding: str) -> bytes:
    """`_codecs.encode`, which protocol 2 writes bytes by."""
    if encoding not in ("latin1", "latin-1"):
        raise ForbiddenError("a text is encoded in latin-1 in a request")
    return text.encode(encoding)


def bound(function: Any, owner: Any) -> MethodType:
    """`types.MethodType`."""
    if not isinstance(function, FunctionType):
        raise ForbiddenError("a method is made of a function")
    return MethodType(function, owner)


def rebuild_from_type(guards: Guards) -> Callable[..., Any]:
    """`torch._tensor._rebuild_from_type_v2` for tensors with attributes, and for subclasses."""

    def rebuild(function: Any, kind: type, arguments: tuple[Any, ...], state: Any) -> torch.Tensor:
        made: torch.Tensor = function(*arguments)
        if not isinstance(made, torch.Tensor) or not issubclass(kind, torch.Tensor):
            raise ForbiddenError("what is to be a tensor is none")
        if type(made) is not kind:
            made = made.as_subclass(kind)
        if isinstance(state, tuple):
            state = state[0]
        for name, value in (state or {}).items():
            if not name.startswith("__"):
                made.__dict__[name] = value
        return made

    return rebuild


def import_for(modules: Modules) -> Callable[[str], ModuleType]:
    """`cloudpickle.subimport`: the module as a block may have it."""
    return modules.get


def module_for(modules: Modules) -> Callable[[str, dict[str, Any]], ModuleType]:
    """`cloudpickle.dynamic_subimport`: a module of the user's own."""

    def made(name: str, variables: dict[str, Any]) -> UserModule:
        module = UserModule(name)
        module.__dict__.update(
            (key, value)
            for key, value in variables.items()
            if not key.startswith("__")
            or key in ("__doc__", "__package__", "__all__", "__version__")
        )
        modules.users[name] = module
        return module

    return made
