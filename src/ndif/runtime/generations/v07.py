"""nnsight 0.6 and 0.7, whose payload is a tracer and the function into which its block was compiled."""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Generic, NoReturn

import nnsight
import torch
from nnsight import util
from nnsight.intervention import envoy, serialization
from nnsight.intervention import interleaver as interleaving
from nnsight.intervention.backends import base
from nnsight.intervention.tracing import globals as tracing_globals
from nnsight.intervention.tracing.base import Tracer
from nnsight.intervention.tracing.util import ExceptionWrapper
from nnsight.modeling.mixins.remoteable import StreamTracer
from nnsight.schema.request import RequestModel

from ndif.runtime.generations import (
    BlockError,
    ClientStream,
    Generation,
    PayloadError,
    Saves,
    decorated07,  # noqa: F401 - replaces a function of nnsight's
    explain_absent,
    find_class,
    overloaded07,
    sources,
    unpickling_errors,
)
from ndif.runtime.generations.tracebacks07 import codes_above, explain_block, show_lines
from ndif.runtime.generations.unsaved import Unsaved
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.weights import load_arguments
from ndif.sandbox.generics import with_parameters

if TYPE_CHECKING:
    from ndif.sandbox.protector import Protector
    from ndif.sandbox.protector.names import Variables

_END_TIMEOUT_S = 1.0

_started: list[tuple[Any, threading.Thread]] = []
"""Mediators of the running block, each with its thread."""


def _end_workers() -> None:
    """End the threads of a block, because after an error one of them may wait at a barrier forever."""
    for mediator, _ in _started:
        # "release unlocked lock": the mediator is already cancelled.
        with contextlib.suppress(RuntimeError):
            mediator.response_queue.put(interleaving.Cancelation())
    for _, thread in _started:
        thread.join(_END_TIMEOUT_S)
    _started.clear()


_mediators: list[Any] = []
_start = interleaving.Mediator.start


def _start_and_record(mediator: Any, interleaver: Any) -> None:
    """Replace `Mediator.start`: record the mediator for which nnsight calls `_thread`."""
    _mediators.append(mediator)
    try:
        _start(mediator, interleaver)
    finally:
        _mediators.pop()


def _thread(
    *, target: Callable[..., None], args: tuple[Any, ...] = (), **others: Any
) -> threading.Thread:
    """Replace `Thread`: also report `sys.exit` to the mediator, because the model would wait forever."""
    mediator = _mediators[-1]

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:
            mediator.exception(error)

    thread = threading.Thread(target=run, **others)
    _started.append((mediator, thread))
    return thread


interleaving.Mediator.start = _start_and_record
interleaving.Thread = _thread


_BLOCKS = "__ndif_blocks__"
"""The attribute of an error with the positions of all blocks when the model raised it."""
_LAST_SWAP = "__ndif_gave__"
"""The attribute of a mediator with the position at which its block last gave the model a value."""

_exit = interleaving.Interleaver.__exit__
_handle_swap = interleaving.Mediator.handle_swap_event
_NOT_MODEL_ERRORS = (
    ExceptionWrapper,  # an error of a block, whose traceback shows the line
    interleaving.EarlyStopException,
    interleaving.Cancelation,
)


def _exit_and_record(
    interleaver: Any, cls: type[BaseException] | None, error: BaseException | None, tb: Any
) -> Any:
    """Replace `Interleaver.__exit__`: attach the positions of the blocks to an error of the model."""
    if error is not None and not isinstance(error, _NOT_MODEL_ERRORS):
        blocks = [
            (codes, mediator.info)
            for mediator in interleaver.mediators
            for codes in (getattr(mediator, _LAST_SWAP, ()), _codes_of(mediator))
        ]
        setattr(error, _BLOCKS, blocks)
    return _exit(interleaver, cls, error, tb)


def _codes_of(mediator: Any) -> list[tuple[CodeType, int]]:
    """Return the code and line of each call in which the thread of a block waits."""
    worker = mediator.worker
    return codes_above(sys._current_frames().get(worker.ident)) if worker is not None else []


def _handle_swap_and_record(mediator: Any, provider: Any, requester: Any, value: Any) -> Any:
    """Replace `Mediator.handle_swap_event`: record the position of the block, whose thread waits meanwhile.

    `Mediator.swap`, which that thread calls, cannot be replaced: it searches its callers for the block.
    """
    if provider == requester:
        setattr(mediator, _LAST_SWAP, _codes_of(mediator))
    return _handle_swap(mediator, provider, requester, value)


def _describe_blocks(error: BaseException) -> str:
    """Return a text with the lines of the blocks that ran when the model raised `error`, else ""."""
    blocks = getattr(error, _BLOCKS, ())
    lines = dict.fromkeys(show_lines(codes, info, _INTERNAL) for codes, info in blocks)
    shown = "\n".join(filter(None, lines))
    return f"\nIn the model, while your block was here:\n{shown}" if shown else ""


interleaving.Interleaver.__exit__ = _exit_and_record
interleaving.Mediator.handle_swap_event = _handle_swap_and_record


_INTERNAL = str(Path(nnsight.__file__).parent)

_SERIALIZATION = "nnsight.intervention.serialization"
_TEXT, _FILENAME, _NAMES = 0, 2, 9
"""Positions of the source, the file name and the names among the arguments of `make_function`."""
_FRAME = "get_non_nnsight_frame"
_FRAMED = [
    module
    for name, module in [*sys.modules.items()]
    if name.startswith("nnsight.") and _FRAME in vars(module)
]
"""The modules of nnsight that search for the frame of the user's code."""

_Unpickler = serialization.CustomCloudUnpickler
_setstate = serialization._source_function_setstate
_interleave = envoy.Envoy.interleave

try:
    _CONVERT: tuple[Any, str] = importlib.import_module("nnsight.intervention.source"), "convert"
except ImportError:  # nnsight 0.6
    _CONVERT = envoy, "inject"
_convert = getattr(*_CONVERT)
"""The function that compiles a module's forward for `.source`."""


_MODULE = "Module:"
"""The prefix of a reference to a module of the model."""


class _AbsentModule(torch.nn.Module):
    """A module that only the client's copy of the model has."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def forward(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{self._path} cannot be called")


class _Objects(dict[str, Any]):
    """The objects that a payload may refer to; an unknown module becomes an `_AbsentModule`.

    A request refers to every module that its author ever attached to the model, whether used or not.
    """

    def explain_absent_in(self, text: str) -> str:
        """Return the sentence about an absent module that the error `text` names, else ""."""
        absent = [name for name, value in self.items() if isinstance(value, _AbsentModule)]
        names = (name for name in absent if name.removeprefix(_MODULE) in text)
        return next((f"\n{explain_absent(name)}" for name in names), "")

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith(_MODULE))

    def __missing__(self, name: str) -> _AbsentModule:
        module = self[name] = _AbsentModule(name.removeprefix(_MODULE))
        return module


class Nnsight07(Generation):
    """Load and run models with nnsight 0.7."""

    name = "0.7"

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def load(self, spec: ModelSpec) -> None:
        """See `Generation.load`; a model must be for text generation."""
        if spec.task not in (None, "text-generation"):
            raise ValueError(
                f"nnsight {self.name} serves text generation only; nnsight 0.8 serves {spec.task}."
            )
        self.model = nnsight.LanguageModel(
            spec.checkpoint, revision=spec.revision, dispatch=True, **load_arguments(spec)
        )
        self._objects = self.model._remoteable_persistent_objects()

    def serialize(self, tracer: Any) -> bytes:
        request = RequestModel(interventions=base.Backend()(tracer), tracer=tracer)
        return bytes(request.serialize(False))

    def _run(self, payload: bytes, stream: ClientStream, policy: Protector | None) -> Saves:
        sources.forget()
        objects = _Objects(self._objects if policy is None else policy.objects(self._objects))
        with unpickling_errors(self.name):
            request = RequestModel.deserialize(payload, objects, False)
            if policy is not None:
                _check(policy, request)
            tracer, fn, frame = request.tracer, request.interventions, request.tracer.info.frame
        # The payload has a substitute for the client's frame. nnsight would write to it as to a real frame,
        # beyond its memory.
        tracer.info.frame = None
        streamed: list[int] = []

        def send(data: bytes) -> None:
            streamed.append(len(data))
            stream.send(data)

        blocks = [fn, *(mediator.intervention for mediator in getattr(tracer, "mediators", ()))]
        unsaved = Unsaved(*map(sources.names_of, blocks))
        # Static, because nnsight calls `self._send(data)`, which would bind a plain function.
        StreamTracer.register(staticmethod(send), staticmethod(stream.receive))
        try:
            self._enter()
            sources.instrument(())
            values: Saves = tracer.execute(fn)
            saved = tracing_globals.Globals.saves
            values = {**_filled_containers(blocks, saved), **values}
            values = {name: value for name, value in values.items() if _holds_saved(value, saved)}
            codes = [block.__code__ for block in blocks]
            sent = {*saved, *map(id, values.values())}
            for hint in unsaved.hints(sent, len(values) + len(streamed), codes):
                print(hint)
        except BaseException as error:
            tracer.info.frame = frame
            text = explain_block(error, tracer.info, _INTERNAL) + _describe_blocks(error)
            raise BlockError(text + objects.explain_absent_in(text)) from error
        else:
            return values
        finally:
            StreamTracer.deregister()
            _end_workers()
            # The cache is keyed by file and line: an edited script's next run would get the old block.
            tracing_globals.Globals.clear()

    def export(self, saves: Saves) -> Saves:
        """See `Generation.export`. Values are marked as saved on unpickling; the client drops others."""
        return {name: _Saved(value) for name, value in saves.items()}

    def forget(self) -> None:
        linecache.clearcache()
        sources.forget()

    def _enter(self) -> None:
        """Prepare nnsight's globals for `.save()`, as the beginning of a trace does."""
        tracing_globals._ensure_mounted()

    def _guarding(self, policy: Protector) -> AbstractContextManager[None]:
        def make_function(*arguments: Any) -> Any:
            adapted = list(arguments)
            adapted[_FILENAME] = policy.filename(adapted[_FILENAME])
            names = adapted[_NAMES] = policy.scope(adapted[_NAMES])
            try:
                function = serialization.make_function(*adapted)
            except ValueError as error:
                # Only the cause names a line of the user's code.
                raise error.__cause__ or error from None
            adopted = policy.adopt(function, names)
            sources.record(adapted[_TEXT], adopted)
            return adopted

        def setstate(function: FunctionType, state: tuple[Any, Variables]) -> None:
            attributes, slots = state
            names = slots.get("__globals__", {})
            policy.fill(function, names)
            if isinstance(function, FunctionType):
                attributes = {
                    name: value for name, value in attributes.items() if not name.startswith("__")
                }
                _setstate(function, (attributes, {**slots, "__globals__": policy.scope(names)}))

        def unpickler(file: Any, persistent: Mapping[str, Any] | None = None) -> Any:
            guarded, cloud = policy.rebuilders(), overloaded07.CLOUD
            make, fill = (cloud, overloaded07.MAKE), (cloud, overloaded07.FILL)
            rebuilders: dict[tuple[str, str], Any] = {
                make: overloaded07.making(guarded[make]),
                fill: overloaded07.filling(guarded[fill]),
                (_SERIALIZATION, "make_function"): make_function,
                (_SERIALIZATION, "_source_function_setstate"): setstate,
            }
            return policy.unpickler(rebuilders)(file, persistent)

        def interleave(self: Any, fn: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(fn, str):
                policy.check_call(self, fn)
            return _interleave(self, fn, *arguments, **options)

        def convert(function: Any, *arguments: Any) -> Any:
            policy.check_instrumented(function)
            return _convert(function, *arguments)

        replaced = [
            (serialization, "CustomCloudUnpickler", unpickler),
            (envoy.Envoy, "interleave", interleave),
            (*_CONVERT, convert),
            (util, "fetch_attr", policy.follow),
            *((module, _FRAME, _user_frame) for module in _FRAMED),
        ]
        return policy.guarding([base, serialization], replaced)


class Nnsight06(Nnsight07):
    """Load and run models with nnsight 0.6, which counts the depth of nested traces."""

    name = "0.6"

    def export(self, saves: Saves) -> Saves:
        return saves

    def _enter(self) -> None:
        tracing_globals.Globals.enter()
        # One level deeper than on a client: the end of the outermost trace forgets saved values.
        tracing_globals.Globals.enter()


def _filled_containers(blocks: list[FunctionType], saved: set[int]) -> Saves:
    """Return the script's lists and dicts that hold saved values: on the server, blocks fill copies."""
    if not saved:
        return {}
    return {
        name: value
        for block in blocks
        for name, value in block.__globals__.items()
        if type(value) in (list, dict) and not name.startswith("__") and _holds_saved(value, saved)
    }


def _holds_saved(value: Any, saved: set[int], depth: int = 3) -> bool:
    """Return True if a value is saved, or is a list or dict that holds a saved value."""
    if id(value) in saved:
        return True
    if not depth or type(value) not in (list, dict):
        return False
    items = value.values() if type(value) is dict else value
    return any(
        id(item) in saved or (type(item) in (list, dict) and _holds_saved(item, saved, depth - 1))
        for item in items
    )


class _Saved:
    """A value that unpickling marks as saved in the client's process."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return tracing_globals.save, (self._value,)


_make_dataclass = serialization._make_dataclass_skeleton


@functools.wraps(_make_dataclass)
def _make_dataclass_anywhere(name: str, bases: Any, content: Any, *others: Any) -> Any:
    """Replace `_make_dataclass_skeleton`, which does not support generic classes."""
    # The client's module may be absent here, and string annotations would need it.
    own = {**content, "__module__": "builtins"}
    if Generic in bases:
        own["__orig_bases__"] = with_parameters(bases)
    cls = _make_dataclass(name, bases, own, *others)
    cls.__module__ = content.get("__module__", "__main__")
    return cls


serialization._make_dataclass_skeleton = _make_dataclass_anywhere
serialization.CustomCloudUnpickler.find_class = find_class

_execute = StreamTracer.execute


def _execute_with_source(tracer: Any, fn: Any) -> None:
    """Replace `StreamTracer.execute`: supply the source of `fn`, which has no file."""
    fn.__source__ = "".join(tracer.info.source)
    _execute(tracer, fn)


StreamTracer.execute = _execute_with_source


# The policy for untrusted code


def _user_frame() -> FrameType | None:
    """Replace `get_non_nnsight_frame`: also skip frames of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("nnsight", "ndif"):
            break
    return frame


def _check(policy: Protector, request: Any) -> None:
    """Raise PayloadError unless a request holds a tracer and a function that was sent as source."""
    function, tracer = request.interventions, request.tracer
    if not (isinstance(tracer, Tracer) and isinstance(function, FunctionType)):
        raise PayloadError("The request holds no trace of nnsight.")
    if not policy.runs(function):
        raise PayloadError("The request holds a block that did not come with it.")
    code = tracer.info.frame.f_code
    code.co_filename = policy.filename(code.co_filename)
