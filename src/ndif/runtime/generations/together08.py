"""Several traces of nnsight 0.8 in one forward pass.

nnsight runs the invokes of one trace in one pass, each with its own rows. Here each trace is such an
invoke, if three things hold: its block is row-wise (`row_wise`), its prompts have as many tokens as the
others', so that nothing is padded, and what it reads and edits was seen to have a row for each prompt,
whose values are those of a pass of that prompt alone, but for the rounding of another order of sums. Any
other trace, and any that raises an error, is left to run alone.
"""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import nnsight
import torch
from nnsight.intervention.batching import Batcher
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import Mediator
from nnsight.intervention.tracer import InterleavingTracer
from nnsight.intervention.util import first_input
from nnsight.modeling.language import LanguageModel
from nnsight.modeling.transformers import TransformersModel
from nnsight.tracing import tracer as tracing

from ndif.runtime.generations.row_wise import Kind, is_row_wise
from ndif.runtime.generations.unsaved import Unsaved

_MOST_TOKENS = 4096
"""Tokens in one pass: of more, a pass for each trace takes no longer."""
_ROWS, _TOKENS = 3, 5
"""The pass by which a model is known: no dimension of a model is as easily taken for another."""
_ATTEMPTS = 2
_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.Tensor,
    torch.dtype,
    torch.device,
)
_MODELS = (TransformersModel, LanguageModel)
_NAMESPACES = (torch, torch.nn, torch.nn.functional)

Read = Callable[[bytes], Any]
"""Makes the tracer of a payload, or raises."""


class Together:
    """The passes of one model that several traces share."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self._modules = frozenset(
            part for name, _ in model._module.named_modules() for part in name.split(".") if part
        )
        self._row_wise: frozenset[str] | None = None
        """Locations at which a pass has a row for each prompt; None before they are known."""

    def run(self, payloads: Sequence[bytes], read: Read) -> list[dict[str, Any] | None]:
        """Return the saved values of each trace; None for one that is to run alone."""
        found: list[dict[str, Any] | None] = [None] * len(payloads)
        waiting = list(range(len(payloads)))
        for _ in range(_ATTEMPTS):
            # Anew in each attempt: a block fills containers that came with it.
            members = [self._member(at, payloads[at], read) for at in waiting]
            failed: set[int] = set()
            for group in _groups([each for each in members if each is not None]):
                try:
                    self._run(group)
                except Exception:
                    # Those who were not to blame share another pass.
                    failed |= {each.at for each in group if not each.has_failed}
                else:
                    for each in group:
                        found[each.at] = each.values
            waiting = sorted(failed)
            if len(waiting) < 2:
                break
        return found

    def _member(self, at: int, payload: bytes, read: Read) -> _Member | None:
        """Return a trace that may run beside others; None for one that may not."""
        try:
            tracer = read(payload)
            if not self._is_plain(tracer):
                return None
            args, encoding = tracer.envoy._batch([(tracer.args, tracer.kwargs)], tracer.fn)
        except Exception:  # alone, it says what is wrong
            return None
        rows = encoding.get("input_ids")
        if args or not isinstance(rows, torch.Tensor) or rows.dim() != 2:
            return None
        if not all(
            isinstance(each, torch.Tensor) and len(each) == len(rows) for each in encoding.values()
        ):
            return None
        return _Member(at, tracer, encoding)

    def _is_plain(self, tracer: Any) -> bool:
        envoy = tracer.envoy
        if type(tracer) is not InterleavingTracer or type(envoy) not in _MODELS:
            return False
        if getattr(tracer.fn, "__func__", None) is not TransformersModel._call:
            return False  # it generates
        if tracer.kwargs or len(tracer.args) != 1:
            return False
        if envoy._edits or envoy._rename or envoy._module is not self._model._module:
            return False
        if type(envoy)._batcher_class is not Batcher or not self.locations:
            return False
        frame = tracer.info.frame
        names = {
            name: kind
            for name, value in {**frame.f_globals, **frame.f_locals}.items()
            if (kind := _kind_of(value)) is not None
        }
        source = "".join(linecache.cache[frame.f_code.co_filename][2])  # type: ignore[misc]
        return is_row_wise(source, names, self._modules)

    def _run(self, group: Sequence[_Member]) -> None:
        """Run traces in one pass; their frames have the values afterwards."""
        batcher = _Joined(self._model)
        interleaver = self._model.interleaver
        tracing.inc()
        try:
            for each in group:
                each.mediator = _Guarded(each, self.locations)
                each.mediator.batch_group = batcher.join(each.encoding)
                interleaver.mediators.append(each.mediator)
            self._model.interleave(self._model._call, batcher=batcher)
            for each in group:
                each.end()
        except Exception:
            if not any(each.has_failed for each in group):
                # The pass has ended, and a block waits for what did not come.
                for each in group:
                    each.has_failed = each.mediator is None or each.mediator.pending is not None
            raise
        finally:
            interleaver.cancel()
            tracing.dec()

    @property
    def locations(self) -> frozenset[str]:
        """Return the locations whose values are row by row those of a pass of that row alone."""
        if self._row_wise is None:
            try:
                self._row_wise = _row_wise_locations(self._model)
            except Exception:  # a model that takes other inputs than tokens
                self._row_wise = frozenset()
        return self._row_wise


@dataclass(eq=False)
class _Member:
    """One trace of a pass."""

    at: int
    """Place among the payloads."""
    tracer: Any
    encoding: Mapping[str, torch.Tensor]
    mediator: Any = None
    has_failed: bool = False
    values: dict[str, Any] | None = None
    """Values for its client; None if it is to run alone."""
    _unsaved: Unsaved = field(init=False)

    def __post_init__(self) -> None:
        frame = self.tracer.info.frame
        self._unsaved = Unsaved(frame.f_globals, frame.f_locals)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return what the encodings of one pass have in common: their names, and the number of tokens."""
        return *sorted(self.encoding), self.encoding["input_ids"].shape[1]

    def end(self) -> None:
        """Take the block's values, once the pass has ended."""
        frame = self.tracer.info.frame
        tracing.push_result(frame, self.mediator.lcls.writes())
        saved = tracing._saves()
        values = {
            name: value
            for name, value in frame.f_locals.items()
            if id(value) in saved and not name.startswith("__nnsight_")
        }
        hints = self._unsaved.hints(saved, len(values), [self.tracer.info.code])
        # What its author should be told is told where it runs alone.
        self.values = None if list(hints) else _Copies().of(values)


class _Guarded(Mediator):  # type: ignore[misc]
    """A block of a pass, which is kept from values that have no row of its own."""

    def __init__(self, member: _Member, locations: frozenset[str]) -> None:
        tracer = member.tracer
        frame = tracer.info.frame
        super().__init__(tracer.info.code, frame.f_globals, dict(frame.f_locals), node=tracer.node)
        self._member = member
        self._locations = locations

    def handle(self, provider: str, value: Any) -> Any:
        """See `Mediator.handle`."""
        if provider not in self._locations:
            self._member.has_failed = True
            raise LookupError(provider)
        return super().handle(provider, value)

    def switch(self, *args: Any) -> Any:
        """See `Mediator.switch`."""
        try:
            return super().switch(*args)
        except BaseException:
            self._member.has_failed = True
            raise


class _Joined(Batcher):  # type: ignore[misc]
    """The rows of several traces, which are encoded already."""

    def __init__(self, envoy: Envoy) -> None:
        super().__init__(envoy)
        self._encodings: list[Mapping[str, torch.Tensor]] = []

    def join(self, encoding: Mapping[str, torch.Tensor]) -> list[int]:
        """Add the rows of a trace, and return their place."""
        group = [self.total, len(encoding["input_ids"])]
        self.total += group[1]
        self.invokes.append(((), {}))
        self._encodings.append(encoding)
        return group

    def assemble(self, fn: Any) -> tuple[tuple[()], dict[str, torch.Tensor]]:
        """See `Batcher.assemble`."""
        return (), {
            name: torch.cat([each[name] for each in self._encodings]) for name in self._encodings[0]
        }


def _groups(members: Sequence[_Member]) -> Iterator[list[_Member]]:
    """Yield the traces that share a pass, several each."""
    of_shape = defaultdict(list)
    for each in members:
        of_shape[each.shape].append(each)
    for shape, alike in of_shape.items():
        group: list[_Member] = []
        rows = 0
        for each in alike:
            if (rows + len(each.encoding["input_ids"])) * shape[-1] > _MOST_TOKENS:
                break
            rows += len(each.encoding["input_ids"])
            group.append(each)
        if len(group) > 1:
            yield group


def _kind_of(value: Any) -> Kind | None:
    """Return what a value from a script is in a block; None for what a row-wise block does not have."""
    if type(value) in (Envoy, *_MODELS):
        return Kind.PART
    if any(value is each for each in _NAMESPACES):
        return Kind.TORCH
    if value is nnsight:
        return Kind.NNSIGHT
    return Kind.VALUE if _is_plain(value) else None


def _is_plain(value: Any, depth: int = 4) -> bool:
    if type(value) in (list, tuple, set):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    if type(value) is dict:
        return depth > 0 and all(_is_plain(each, depth - 1) for each in [*value, *value.values()])
    return type(value) in (*_PLAIN, range, slice)


class _Copies:
    """Copies of saved values without the rows of others, which a view of a pass would bring along."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Return a value in which each view of a pass is a copy; views of one place stay one."""
        if isinstance(value, torch.Tensor):
            if value.untyped_storage().nbytes() <= value.numel() * value.element_size():
                return value
            place = value.data_ptr(), value.dtype, value.shape, value.stride()
            if place not in self._made:
                copy = value.detach().clone()
                self._made[place] = copy.requires_grad_(value.requires_grad)
            return self._made[place]
        if type(value) in (list, tuple, set):
            return type(value)(map(self.of, value))
        if type(value) is dict:
            return {name: self.of(each) for name, each in value.items()}
        return value


# The locations of a model


def _row_wise_locations(model: TransformersModel) -> frozenset[str]:
    """Compare a pass of several prompts with one of each, at every module."""
    size = model._module.get_input_embeddings().num_embeddings
    rows = torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS) * 7919 % size
    alone = [_seen(model, row[None]) for row in rows]
    together = _seen(model, rows)
    return frozenset(
        location
        for location, value in together.items()
        if all(
            location in each and _has_row(value, at, each[location])
            for at, each in enumerate(alone)
        )
    )


def _seen(model: TransformersModel, rows: torch.Tensor) -> dict[str, Any]:
    """Return what a pass has at each module: its first input and its output."""
    seen: dict[str, Any] = {}
    hooks = []

    def watch(path: str, module: torch.nn.Module) -> None:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            seen.setdefault(f"{path}.input", _copied(first_input(args, kwargs)))

        def after(_: Any, __: Any, output: Any) -> None:
            seen.setdefault(f"{path}.output", _copied(output))

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(after))

    for part in (model, *model.modules()):
        watch(part.path, part._module)
    try:
        _, encoding = model._batch([((rows,), {})], model._call)
        device = model.device
        with torch.no_grad():
            model._module(**{name: each.to(device) for name, each in encoding.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return seen


_OTHER = object()


def _copied(value: Any) -> Any:
    """Return a copy of what a module takes or gives; `_OTHER` where that is no tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return [_copied(each) for each in value]
    return None if value is None else _OTHER


def _has_row(value: Any, at: int, alone: Any) -> bool:
    """Return True if what a pass has in one row is what there is in a pass of that row alone."""
    if isinstance(value, torch.Tensor) and isinstance(alone, torch.Tensor):
        if value.shape[:1] != (_ROWS,) or alone.shape != (1, *value.shape[1:]):
            return False
        row = value[at : at + 1]
        if not value.is_floating_point():
            return bool(torch.equal(row, alone))
        difference = (row.double() - alone.double()).norm()
        return bool(difference <= torch.finfo(value.dtype).eps ** 0.5 * alone.double().norm())
    if isinstance(value, list) and isinstance(alone, list):
        return len(value) == len(alone) and all(
            _has_row(each, at, other) for each, other in zip(value, alone, strict=True)
        )
    return value is None and alone is None
