"""nnsight 0.6 and 0.7: a payload is a tracer and the function that its block was compiled into."""

from __future__ import annotations

import contextlib
import linecache
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nnsight
from nnsight.intervention import interleaver as interleaving
from nnsight.intervention.backends.base import Backend
from nnsight.intervention.tracing import globals as tracing_globals
from nnsight.modeling.mixins.remoteable import StreamTracer
from nnsight.schema.request import RequestModel

from ndif.runtime.generations.errors import BlockError, unpickling_errors
from ndif.runtime.generations.guarded07 import check, guarding
from ndif.runtime.generations.port import ClientStream, CodePolicy
from ndif.runtime.generations.tracebacks07 import explain_block
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.weights import Placement, load_arguments

_END_TIMEOUT_S = 1.0

_started: list[tuple[Any, threading.Thread]] = []
"""Mediators of the running block, each with its thread."""


def end_workers() -> None:
    """End the threads of a block: after an error one of them may wait at a barrier for ever."""
    for mediator, _ in _started:
        # "release unlocked lock": the mediator was cancelled before.
        with contextlib.suppress(RuntimeError):
            mediator.response_queue.put(interleaving.Cancelation())
    for _, thread in _started:
        thread.join(_END_TIMEOUT_S)
    _started.clear()


_mediators: list[Any] = []
_start = interleaving.Mediator.start


def _start_known(mediator: Any, interleaver: Any) -> None:
    """Replace `Mediator.start`: note which mediator `_thread` is called for."""
    _mediators.append(mediator)
    try:
        _start(mediator, interleaver)
    finally:
        _mediators.pop()


def _thread(
    *, target: Callable[..., None], args: tuple[Any, ...] = (), **others: Any
) -> threading.Thread:
    """Return a thread that reports its end by `sys.exit`; the model would wait for it for ever."""
    mediator = _mediators[-1]

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:
            mediator.exception(error)

    thread = threading.Thread(target=run, **others)
    _started.append((mediator, thread))
    return thread


interleaving.Mediator.start = _start_known
interleaving.Thread = _thread


_INTERNAL = str(Path(nnsight.__file__).parent)

_REWRITTEN = ("__nnsight_forward__", "_old_forward", "__source_accessor__")
"""Attributes of a module that `.source` changes for good."""


class Nnsight07:
    """Load and run models with nnsight 0.7."""

    name = "0.7"

    def __init__(self) -> None:
        self.model: Any = None
        self._objects: dict[str, Any] = {}
        self._forwards: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooks: list[tuple[dict[int, Any], frozenset[int]]] = []

    def load(self, spec: ModelSpec) -> None:
        """See `Generation.load`.

        Raises:
            ValueError: if the model's task is not text generation.
        """
        if spec.task not in (None, "text-generation"):
            raise ValueError(
                f"nnsight {self.name} serves text generation only; nnsight 0.8 serves {spec.task}."
            )
        self.model = nnsight.LanguageModel(
            spec.checkpoint, revision=spec.revision, dispatch=True, **load_arguments(spec)
        )
        self._objects = self.model._remoteable_persistent_objects()
        self._remember()

    def load_meta(self, spec: ModelSpec, placement: Placement) -> None:
        """See `Generation.load_meta`."""
        self.load(replace(spec, device="meta"))
        self.move(placement)

    def move(self, placement: Placement) -> None:
        """See `Generation.move`."""
        placement.apply(self.model._module)
        self._remember()

    def _remember(self) -> None:
        """Record the attributes and hooks of every module, for `forget` to restore."""
        self._forwards, self._hooks = [], []
        for module in self.model._module.modules():
            now = vars(module)
            self._forwards.append((now, {name: now[name] for name in _REWRITTEN if name in now}))
            hooks = [now[name] for name in now if "_hooks" in name and isinstance(now[name], dict)]
            self._hooks += [(registered, frozenset(registered)) for registered in hooks]

    def run(
        self,
        payload: bytes,
        env: Mapping[str, Any],
        stream: ClientStream,
        policy: CodePolicy | None = None,
    ) -> dict[str, Any]:
        """See `Generation.run`. A client of this generation sends no `env`."""
        if policy is None:
            return self._run(payload, self._objects, stream, None)
        objects = policy.objects(self._objects)
        with guarding(policy):
            return self._run(payload, objects, stream, policy)

    def _run(
        self,
        payload: bytes,
        objects: dict[str, Any],
        stream: ClientStream,
        policy: CodePolicy | None,
    ) -> dict[str, Any]:
        with unpickling_errors(self.name):
            request = RequestModel.deserialize(payload, objects, False)
            if policy is not None:
                check(policy, request)
            tracer, fn, frame = request.tracer, request.interventions, request.tracer.info.frame
        # The payload holds a stand-in for the client's frame. nnsight would write into the stand-in as
        # into a real frame, out of the bounds of its memory.
        tracer.info.frame = None
        # nnsight calls `self._send(data)`: a plain function would become a method.
        StreamTracer.register(staticmethod(stream.send), staticmethod(stream.receive))
        try:
            self._enter()
            values = tracer.execute(fn)
            saved = tracing_globals.Globals.saves
            return {name: value for name, value in values.items() if id(value) in saved}
        except BaseException as error:
            tracer.info.frame = frame
            raise BlockError(explain_block(error, tracer.info, _INTERNAL)) from error
        finally:
            StreamTracer.deregister()
            end_workers()
            # The cache is keyed by file and line: an edited script's next run would get the old block.
            tracing_globals.Globals.clear()

    def export(self, saves: dict[str, Any]) -> dict[str, Any]:
        """See `Generation.export`. The client drops values that its own process has not marked as saved."""
        return {name: _Saved(value) for name, value in saves.items()}

    def forget(self) -> None:
        """See `Generation.forget`."""
        linecache.clearcache()
        for now, before in self._forwards:
            for name in _REWRITTEN:
                now.pop(name, None)
            now.update(before)
        # A cache, or a scan that failed, leaves its hooks behind. They would observe the next request.
        for registered, before_run in self._hooks:
            if len(registered) != len(before_run):
                for key in registered.keys() - before_run:
                    del registered[key]

    def warmup_payload(self, prompt: str) -> bytes:
        """See `Generation.warmup_payload`."""
        return _payload_of_first_output(self.model, prompt)

    def _enter(self) -> None:
        """Enter a trace, as far as `.save()` is concerned."""
        tracing_globals._ensure_mounted()


class Nnsight06(Nnsight07):
    """Load and run models with nnsight 0.6, which counts the depth of nested traces."""

    name = "0.6"

    def export(self, saves: dict[str, Any]) -> dict[str, Any]:
        """See `Generation.export`."""
        return saves

    def _enter(self) -> None:
        tracing_globals.Globals.enter()
        # One level deeper than a client: the outermost trace forgets saved values when it ends.
        tracing_globals.Globals.enter()


class _Saved:
    """A value that is marked as saved in the process that unpickles it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return tracing_globals.save, (self._value,)


_execute = StreamTracer.execute


def _execute_with_source(tracer: Any, fn: Any) -> None:
    """Replace `StreamTracer.execute`: supply the source of `fn`, which has no file to read it from."""
    fn.__source__ = "".join(tracer.info.source)
    _execute(tracer, fn)


StreamTracer.execute = _execute_with_source


class _KeepPayload(Backend):  # type: ignore[misc]
    """A backend that keeps the payload that a client would send."""

    payload: bytes

    def __call__(self, tracer: Any) -> None:
        """See `Backend`."""
        interventions = super().__call__(tracer)
        request = RequestModel(interventions=interventions, tracer=tracer)
        self.payload = request.serialize(False)


def _payload_of_first_output(model: Any, prompt: str) -> bytes:
    backend = _KeepPayload()
    with model.trace(prompt, backend=backend):
        first = model.output[0].save()  # noqa: F841 - the result of the trace
    return backend.payload
