"""nnsight 0.7: a payload is a tracer, and the function that its block was compiled into."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nnsight
from nnsight.intervention.tracing import globals as tracing_globals
from nnsight.modeling.mixins.remoteable import StreamTracer
from nnsight.schema.request import RequestModel

from ndif.runtime.generations.blocks import explain_block
from ndif.runtime.generations.guarded07 import check, guarding
from ndif.runtime.generations.loading import load_arguments
from ndif.runtime.generations.port import BlockError, Conversation, Policy
from ndif.runtime.generations.unpacking import unpacking
from ndif.runtime.generations.workers import end_workers
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights import Placement

_INTERNAL = str(Path(nnsight.__file__).parent)

_REWRITTEN = ("__nnsight_forward__", "_old_forward", "__source_accessor__")
"""What `.source` changes on a module, for good."""


class Nnsight07:
    """The adapter of this generation."""

    name = "0.7"

    def __init__(self) -> None:
        self.model: Any = None
        self._objects: dict[str, Any] = {}
        self._forwards: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooks: list[tuple[dict[int, Any], frozenset[int]]] = []

    def load(self, spec: ModelSpec) -> None:
        """See `Generation.load`.

        Raises:
            ValueError: if the model is not for text generation.
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
        """Note how every module is, for `forget` to have it so again."""
        self._forwards, self._hooks = [], []
        for module in self.model._module.modules():
            now = vars(module)
            self._forwards.append((now, {name: now[name] for name in _REWRITTEN if name in now}))
            hooks = [now[name] for name in now if "_hooks" in name and isinstance(now[name], dict)]
            self._hooks += [(held, frozenset(held)) for held in hooks]

    def run(
        self,
        payload: bytes,
        env: Mapping[str, Any],
        conversation: Conversation,
        policy: Policy | None = None,
    ) -> dict[str, Any]:
        """See `Generation.run`. A client of this generation sends no `env`."""
        if policy is None:
            return self._run(payload, self._objects, conversation, None)
        objects = policy.objects(self._objects)
        with guarding(policy):
            return self._run(payload, objects, conversation, policy)

    def _run(
        self,
        payload: bytes,
        objects: dict[str, Any],
        conversation: Conversation,
        policy: Policy | None,
    ) -> dict[str, Any]:
        with unpacking(self.name):
            request = RequestModel.deserialize(payload, objects, False)
            if policy is not None:
                check(policy, request)
            tracer, fn, frame = request.tracer, request.interventions, request.tracer.info.frame
        # The client's frame came as a stand-in, and nnsight would write into it as into a real one,
        # out of the bounds of its memory.
        tracer.info.frame = None
        # What is called as `self._send(data)` must not become a method.
        StreamTracer.register(staticmethod(conversation.send), staticmethod(conversation.receive))
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
        """See `Generation.export`. This client drops what is not marked as saved in its own process."""
        return {name: _Saved(value) for name, value in saves.items()}

    def forget(self) -> None:
        """See `Generation.forget`."""
        linecache.clearcache()
        for now, before in self._forwards:
            for name in _REWRITTEN:
                now.pop(name, None)
            now.update(before)
        # A cache, or a scan that failed, leaves its hooks behind. They would watch the next request.
        for now_held, held_before in self._hooks:
            if len(now_held) != len(held_before):
                for key in now_held.keys() - held_before:
                    del now_held[key]

    def _enter(self) -> None:
        """Be inside a trace, as far as `.save()` is concerned."""
        tracing_globals._ensure_mounted()


class _Saved:
    """A value that is marked as saved where it is unpickled."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return tracing_globals.save, (self._value,)


_execute = StreamTracer.execute


def _execute_with_source(tracer: Any, fn: Any) -> None:
    """`StreamTracer.execute`, which sends `fn` by its source and cannot find it: it has no file."""
    fn.__source__ = "".join(tracer.info.source)
    _execute(tracer, fn)


StreamTracer.execute = _execute_with_source
