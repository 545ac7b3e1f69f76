"""nnsight 0.8, whose payload is a tracer, the source of its block, and the values that it refers to."""

from __future__ import annotations

import ast
import functools
import linecache
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from types import CellType, CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import nnsight
import torch
from nnsight.intervention import envoy, interleaver, iterator, serialization, source
from nnsight.intervention import tracer as interleaving
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema import request
from nnsight.schema.request import RequestModel
from nnsight.tracing import globals as tracing_globals
from nnsight.tracing import tracer as tracing

from ndif.runtime.generations import (
    BlockError,
    ClientStream,
    Generation,
    PayloadError,
    Saves,
    find_class,
    sources,
    unpickling_errors,
)
from ndif.runtime.generations.co_batch_nnsight08 import SharedPassRunner
from ndif.runtime.generations.unsaved import Unsaved
from ndif.runtime.results import trusted
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import explain, show_frames
from ndif.runtime.weights.weights import ModelDevices, load_arguments

if TYPE_CHECKING:
    from ndif.sandbox.protector import Protector
    from ndif.sandbox.protector.names import Variables

_INTERNAL = str(Path(nnsight.__file__).parent)

# The warning is about a device next to a device map; a pipeline needs both to stay on its device.
logging.getLogger("transformers.pipelines").addFilter(lambda record: "device_map" not in record.msg)


_DEFAULT_ATTENTION = "sdpa"
"""The attention that transformers chooses by default, except for model classes that do not support it."""

_COMPILING = (tracing, interleaving, interleaver, iterator, serialization, request)
_SERIALIZATION = "nnsight.intervention.serialization"

_load_function = serialization._load_function
_fill = serialization._fill
_interleave = envoy.Envoy.interleave
_compile_source = source.compile_source


class Nnsight08(Generation):
    """Load and run models with nnsight 0.8."""

    name = "0.8"

    def __init__(self) -> None:
        self._objects: dict[str, Any] | None = None
        self._shared_passes: SharedPassRunner | None = None
        self._trained: list[tuple[torch.nn.Parameter, bool]] | None = None
        """Each weight with its `requires_grad` before the first adapter was put on the model."""
        self._env: dict[str, Any] = {}
        """The env for which the model is configured."""
        self._attention: str | None = None
        """The attention of the loaded model: the default for a request that names none."""
        self._lacks_default = False

    def load(self, spec: ModelSpec) -> None:
        arguments = load_arguments(spec)
        if arguments.get("device_map", "auto") != "auto":
            # With only the map, the pipeline moves the model to the first GPU.
            arguments["device"] = arguments["device_map"]
        elif spec.device == "cpu":
            # Without a device, the pipeline uses the first GPU if CUDA has started.
            arguments["device"] = "cpu"
        self.model = TransformersModel(
            spec.checkpoint, revision=spec.revision, task=spec.task, dispatch=True, **arguments
        )
        self._attention = self.model.attn_implementation
        if self._attention is not None:
            self._env = {"attn_implementation": self._attention}
        if self._attention not in (None, _DEFAULT_ATTENTION):
            module = self.model._module
            is_supported = module._supports_sdpa and module._can_set_attn_implementation()
            self._lacks_default = not is_supported

    def move(self, placement: ModelDevices) -> None:
        super().move(placement)
        self.model.pipeline.device = torch.device(placement.device)

    def serialize(self, tracer: Any) -> bytes:
        return bytes(RequestModel.serialize(tracer, compress=False))

    def _run(self, payload: bytes, stream: ClientStream, policy: Protector | None) -> Saves:
        if self._objects is None:
            self._objects = self.model._remoteable_persistent_objects()
        objects, unpickler = self._objects, serialization.CustomCloudUnpickler
        if policy is not None:
            objects, unpickler = policy.objects(objects), functools.partial(_Unpickler, policy)
        sources.forget()
        with unpickling_errors(self.name):
            tracer = RequestModel.deserialize(payload, objects, unpickler=unpickler)
            code, frame = tracer.info.code, tracer.info.frame
        unsaved = Unsaved(frame.f_globals, frame.f_locals)
        tracing.inc()
        try:
            _instrument(tracer)
            tracer.execute(code)
            saved = tracing._saves()
            values = {
                name: value
                for name, value in frame.f_locals.items()
                if id(value) in saved and not name.startswith("__nnsight_")
            }
            for hint in unsaved.hints(saved, len(values), [code]):
                print(hint)
        except BaseException as error:
            # nnsight stores the block's own traceback before the error passes through the model's frames.
            tb = getattr(error, "__intervention_tb__", error.__traceback__)
            block = getattr(error, _BLOCK, "")
            raise BlockError(explain(error, tb, _INTERNAL) + block) from error
        else:
            return values
        finally:
            tracing.dec()

    def run_together(self, payloads: Sequence[bytes]) -> list[Saves | None]:
        objects = self._objects = self._objects or self.model._remoteable_persistent_objects()
        if self._shared_passes is None:
            self._shared_passes = SharedPassRunner(self.model)
        return self._shared_passes.run(
            payloads, lambda payload: RequestModel.deserialize(payload, objects)
        )

    def forget(self) -> None:
        # These are keyed by file and line: an edited script's next run would get the old block.
        tracing_globals.BLOCKS.clear()
        tracing_globals.SOURCES.clear()
        linecache.clearcache()
        self.model.interleaver.cancel()
        sources.forget()
        while _instrumented:
            # Otherwise each later pass would stop at every call within these modules.
            state = _instrumented.pop()
            state.body, state.sourced, state.compiled = state.original, False, None

    def prepare(self, env: Mapping[str, Any]) -> bool:
        """See `Generation.prepare`: the adapter and attention apply to this request only."""
        # Clients send None for an unused key, or omit it.
        env = {name: value for name, value in env.items() if value is not None}
        if self._attention is not None:
            env.setdefault("attn_implementation", self._attention)
        if self._lacks_default and env.get("attn_implementation") == _DEFAULT_ATTENTION:
            # This is the default of the client's transformers, not a choice of its user.
            env["attn_implementation"] = self._attention
            print(
                f"The attention is {self._attention!r} here, not {_DEFAULT_ATTENTION!r} as your client "
                f"has it: the server's transformers has no {_DEFAULT_ATTENTION!r} for "
                f"{type(self.model._module).__name__}."
            )
        if env == self._env:
            return False
        if self._trained is None:
            parameters = self.model._module.parameters()
            self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]
        try:
            self.model._remoteable_set_env(env)
        except Exception as error:
            self._env = {"": None}
            raise PayloadError(
                f"The model could not be prepared as the request asks ({env}): "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            self._objects = self._shared_passes = None
        self._env = env
        if "peft" not in env:
            # An adapter freezes the model's weights; they stay frozen when it is removed.
            for parameter, trains in self._trained:
                parameter.requires_grad_(trains)
        return True

    def _guarding(self, policy: Protector) -> AbstractContextManager[None]:
        def compile_block(_: Any, module: Any, frame: Any) -> Any:
            code = policy.compile(module, frame.f_code.co_filename, "exec")
            return code.replace(co_name=frame.f_code.co_name)

        def interleave(self: Any, fn: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(fn, str):
                policy.check_call(self, fn)
            return _interleave(self, fn, *arguments, **options)

        def compile_source(function: Any) -> Any:
            policy.check_instrumented(function)
            return _compile_source(function)

        replaced = [
            (source, "compile_source", compile_source),
            (tracing.Tracer, "compile", compile_block),
            (envoy.Envoy, "interleave", interleave),
        ]
        return policy.guarding(_COMPILING, replaced)


# The modules whose `.source` a request reads

_VIEWS = (source.Source, source.SourceEnvoy)
"""Classes of a module's `.source`; a payload has the instances that its block takes from the script."""

_instrumented: set[source.State] = set()
_install_source = envoy.install_source


def _install_and_record(part: envoy.Envoy) -> source.Compiled:
    """Replace `install_source`: record the instrumented module, for `forget`."""
    compiled = _install_source(part)
    _instrumented.add(vars(part._module)[source.STATE])
    return compiled


envoy.install_source = _install_and_record


def _instrument(tracer: Any) -> None:
    """Instrument the modules whose `.source` a tracer's block, or an edit of its model, will read."""
    frame = tracer.info.frame
    names = {**frame.f_globals, **frame.f_locals}
    blocks = [(_text(frame.f_code), names)]
    for part in (getattr(tracer, "envoy", None), *names.values()):
        if isinstance(part, envoy.Envoy):
            blocks += [(_text(edit.code), {**edit.glbls, **edit.lcls}) for edit in part._edits]
    views = [vars(value).get("envoy") for value in names.values() if type(value) in _VIEWS]
    sources.instrument(blocks, [view for view in views if isinstance(view, envoy.Envoy)])


def _text(code: CodeType) -> str:
    return "".join(linecache.getlines(code.co_filename))


# Errors in the model

_BLOCK = "__ndif_block__"
"""The attribute of an error with the lines that the blocks had reached when the model raised it."""
_LAST_SWAP = "__ndif_gave__"
"""The attribute of a mediator with the position at which its block last gave the model a value."""

_exit = interleaver.Interleaver.__exit__
_swap = interleaver.Mediator.swap


def _exit_and_record(
    self: Any, cls: type[BaseException] | None, error: BaseException | None, tb: Any
) -> Any:
    """Replace `Interleaver.__exit__`: attach the lines of the blocks to an error of the model."""
    stopped = error is None or isinstance(error, interleaver.EarlyStopException)
    if not stopped and not hasattr(error, "__intervention_tb__"):
        lines = dict.fromkeys(
            line for mediator in self.mediators for line in _lines_of(mediator) if line
        )
        if lines:
            shown = "\n".join(lines)
            setattr(error, _BLOCK, f"\nIn the model, while your block was here:\n{shown}")
    return _exit(self, cls, error, tb)


def _lines_of(mediator: Any) -> Iterator[str]:
    """Yield the lines at which a block last gave the model a value, and at which it waits for one."""
    yield show_frames(getattr(mediator, _LAST_SWAP, ()), _INTERNAL)
    if mediator.alive:
        yield show_frames(_stack_of(mediator.worker.gr_frame), _INTERNAL)


def _swap_and_record(cls: Any, location: str, *arguments: Any) -> Any:
    """Replace `Mediator.swap`: record the position of the block."""
    setattr(cls.current(location), _LAST_SWAP, _stack_of(sys._getframe(1)))
    return _swap(location, *arguments)


class _Frame(NamedTuple):
    """A frame without its variables."""

    f_code: CodeType
    f_globals: Variables


def _stack_of(frame: FrameType | None) -> list[tuple[_Frame, int]]:
    """Return a frame of a block and its callers, outermost first."""
    frames: list[tuple[_Frame, int]] = []
    while frame is not None:
        frames.insert(0, (_Frame(frame.f_code, {}), frame.f_lineno))
        frame = frame.f_back
    return frames


interleaver.Interleaver.__exit__ = _exit_and_record
interleaver.Mediator.swap = classmethod(_swap_and_record)


# Methods that use `super()`


@functools.wraps(_load_function)  # keeps the name, by which this process's own payloads call it
def _load_method(source: str, *given: Any) -> FunctionType:
    """Replace `_load_function`: give a method that uses `super()` a cell for its class; record it."""
    function = _method(source, *given)
    trusted.record(function)
    sources.record(source, function)
    return function


def _method(
    source: str,
    name: str,
    defaults: tuple[Any, ...] | None,
    kwdefaults: dict[str, Any] | None,
    annotations: dict[str, Any] | None,
    filename: str,
    line: int,
) -> FunctionType:
    """Return a function, with a cell for its class if it uses `super()` or `__class__`.

    nnsight compiles a method outside its class, so Python creates no `__class__` cell.
    """
    arguments = (source, name, defaults, kwdefaults, annotations, filename, line)
    function: FunctionType = _load_function(*arguments)
    if "super" in source or "__class__" in source:
        return _with_cell(function, source, line)
    return function


def _with_cell(function: FunctionType, source: str, line: int) -> FunctionType:
    """Return a function with an empty cell for its class; the function itself if it needs none."""
    # Python does not mangle names in a class with this name.
    tree = ast.parse("class _: pass")
    [class_node] = tree.body
    assert isinstance(class_node, ast.ClassDef)  # noqa: S101 - the parsed text is a class
    class_node.body = ast.parse("\n" * (line - 1) + source).body
    # Under a policy, `serialization.compile` is the policy's.
    compiled = serialization.compile(tree, function.__code__.co_filename, "exec")
    name, defaults = function.__name__, function.__defaults__
    matching = [
        code
        for class_code in _codes(compiled)
        for code in _codes(class_code)
        if code.co_name == name and code.co_freevars == ("__class__",)
    ]
    if not matching:
        return function
    method = FunctionType(matching[-1], function.__globals__, name, defaults, (CellType(),))
    method.__kwdefaults__, method.__annotations__ = (
        function.__kwdefaults__,
        function.__annotations__,
    )
    return method


def _codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _fill_cell(function: FunctionType, names: Mapping[str, Any]) -> None:
    """Fill the class cell of a method from `_load_method`; the client sends the class as a name."""
    cls = names.get("__class__")
    if function.__code__.co_freevars == ("__class__",) and isinstance(cls, type):
        [cell] = function.__closure__ or ()
        cell.cell_contents = cls


@functools.wraps(_fill)
def _fill_method(function: FunctionType, names: Variables) -> None:
    """Replace `_fill`: also fill the cell for the class."""
    _fill_cell(function, names)
    _fill(function, names)


serialization.compile = compile
serialization.CustomCloudUnpickler.find_class = find_class
serialization._load_function, serialization._fill = _load_method, _fill_method


# The policy for untrusted code


@functools.cache
def _methods() -> dict[tuple[tuple[str, ...], str], Any]:
    """Return nnsight's own traceable methods, by the last parts of their file's path and their name.

    A wrapper has the method's name, so a client cannot refer to the method and sends its source. The server
    uses its own method instead.
    """
    methods = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("nnsight.")]:
        for cls in [value for value in vars(module).values() if isinstance(value, type)]:
            for value in vars(cls).values():
                method = getattr(value, "__wrapped__", None)
                if isinstance(method, FunctionType) and method.__module__ == module.__name__:
                    code = method.__code__
                    methods[PurePath(code.co_filename).parts[-3:], code.co_name] = method
    return methods


class _Unpickler:
    """A replacement for nnsight's unpickler that applies a policy and checks the unpickled request."""

    def __init__(self, policy: Protector, file: Any, persistent: dict[str, Any]) -> None:
        own_methods: list[Any] = []

        def load_function(source: str, name: str, *others: Any) -> Any:
            method = _methods().get((PurePath(str(others[3])).parts[-3:], name))
            if method is not None:
                own_methods.append(method)
                return method
            adopted = policy.adopt(_method(source, name, *others), {})
            sources.record(source, adopted)
            return adopted

        def fill(function: Any, names: Mapping[str, Any]) -> None:
            if function not in own_methods:
                policy.fill(function, names)
                if policy.runs(function):
                    _fill_cell(function, names)

        rebuilders = {
            (_SERIALIZATION, "_load_function"): load_function,
            (_SERIALIZATION, "_fill"): fill,
        }
        self._policy = policy
        self._unpickler = policy.unpickler(rebuilders)(file, persistent)

    def load(self) -> Any:
        """Return a tracer, and the source of its block with names and variables, or raise PayloadError."""
        tracer, (source, names, variables) = self._unpickler.load()
        if not isinstance(tracer, tracing.Tracer) or not isinstance(source, str):
            raise PayloadError("The request holds no trace of nnsight 0.8.")
        code = tracer.info.frame.f_code
        code.co_filename, code.co_name = self._policy.filename(code.co_filename), str(code.co_name)
        return tracer, (source, self._policy.scope(names), self._policy.scope(variables))
