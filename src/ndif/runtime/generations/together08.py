"""Several traces of nnsight 0.8 in one forward pass.

nnsight runs the invokes of one trace in one pass, each with its own rows. Here each trace is such an
invoke, if three things hold: its block is row-wise (`row_wise`), its prompts have as many tokens as the
others', so that nothing is padded, and what it reads and edits was seen to have a row for each prompt,
whose values are those of a pass of that prompt alone, but for the rounding of another order of sums. Any
other trace, and any that raises an error, is left to run alone. So is every trace of a model that is
quantized, or has experts: what it computes of one row may depend on the others.
"""

from __future__ import annotations

import contextlib
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

from ndif.runtime.generations import Saves
from ndif.runtime.generations.row_wise import Edits, Kind, row_wise_edits
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
"""Reader of payloads, which returns a tracer or raises an error."""


class Together:
    """The passes of one model that several traces share."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self._modules = frozenset(
            part for name, _ in model._module.named_modules() for part in name.split(".") if part
        )
        self._locations: Locations | None = None
        """Locations of which a trace may have values; None before they are known."""

    def run(self, payloads: Sequence[bytes], read: Read) -> list[Saves | None]:
        """Return the saved values of each trace; None for one that is to run alone."""
        found: list[Saves | None] = [None] * len(payloads)
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
            edits = self._edits(tracer)
            args, encoding = tracer.envoy._batch([(tracer.args, tracer.kwargs)], tracer.fn)
        except Exception:  # alone, it says what is wrong
            return None
        rows = encoding.get("input_ids")
        if edits is None or args or not isinstance(rows, torch.Tensor) or rows.dim() != 2:
            return None
        if not all(
            isinstance(each, torch.Tensor) and len(each) == len(rows) for each in encoding.values()
        ):
            return None
        return _Member(at, tracer, edits, encoding)

    def _is_plain(self, tracer: Any) -> bool:
        envoy = tracer.envoy
        if type(tracer) is not InterleavingTracer or type(envoy) not in _MODELS:
            return False
        if getattr(tracer.fn, "__func__", None) is not TransformersModel._call:
            return False  # it generates
        if tracer.kwargs or len(tracer.args) != 1:
            return False
        if envoy._edits or envoy._envoys or envoy._rename:
            return False
        is_ours = envoy._module is self._model._module
        return is_ours and type(envoy)._batcher_class is Batcher and bool(self.locations.row_wise)

    def _edits(self, tracer: Any) -> Edits | None:
        """Return how a trace's block edits its rows; None if it may do anything else."""
        frame = tracer.info.frame
        taken = {**frame.f_globals, **frame.f_locals}
        source = "".join(linecache.cache[frame.f_code.co_filename][2])  # type: ignore[misc]
        names = {name: _kind_of(value) for name, value in taken.items()}
        return row_wise_edits(source, names, self._modules)

    def _run(self, group: Sequence[_Member]) -> None:
        """Run traces in one pass; their frames have the values afterwards."""
        batcher = _Joined(self._model, group[0].edits)
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
    def locations(self) -> Locations:
        """Return the locations of which a trace may have values, found by a few passes."""
        if self._locations is None:
            try:
                self._locations = _locations(self._model)
            except Exception:  # a model that takes other inputs than tokens
                self._locations = Locations()
        return self._locations


@dataclass(eq=False)
class _Member:
    """One trace of a pass."""

    at: int
    """Place among the payloads."""
    tracer: Any
    edits: Edits
    encoding: Mapping[str, torch.Tensor]
    mediator: Any = None
    has_failed: bool = False
    saves: set[int] = field(default_factory=set)
    """Ids of the objects that the block has saved."""
    values: Saves | None = None
    """Values for its client; None if it is to run alone."""
    _unsaved: Unsaved = field(init=False)

    def __post_init__(self) -> None:
        frame = self.tracer.info.frame
        self._unsaved = Unsaved(frame.f_globals, frame.f_locals)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return what the traces of one pass have in common; the number of tokens is the last."""
        return self.edits, *sorted(self.encoding), self.encoding["input_ids"].shape[1]

    def end(self) -> None:
        """Take the block's values, once the pass has ended."""
        frame = self.tracer.info.frame
        saved = self.saves
        with _saving(saved):
            tracing.push_result(frame, self.mediator.lcls.writes())
        values = {
            name: value
            for name, value in frame.f_locals.items()
            if id(value) in saved and not name.startswith("__nnsight_")
        }
        hints = self._unsaved.hints(saved, len(values), [self.tracer.info.code])
        if not list(hints):  # what its author should be told is told where it runs alone
            with contextlib.suppress(TypeError):
                self.values = _Copies().of(values)


class _Guarded(Mediator):  # type: ignore[misc]
    """A block of a pass, which is kept from values that have no row of its own."""

    def __init__(self, member: _Member, locations: Locations) -> None:
        tracer = member.tracer
        frame = tracer.info.frame
        super().__init__(tracer.info.code, frame.f_globals, dict(frame.f_locals), node=tracer.node)
        self._member = member
        self._locations = locations

    def handle(self, provider: str, value: Any) -> Any:
        try:
            return self._checked(provider, value)
        except BaseException:
            self._member.has_failed = True
            raise

    def _checked(self, provider: str, value: Any) -> Any:
        """Serve the block; raise an error if that concerns the rows of others."""
        if provider not in self._locations.of(self._member.edits):
            raise LookupError(provider)
        before = _outline(value)
        value = super().handle(provider, value)
        if _outline(value) != before:
            raise ValueError(provider)
        return value

    def switch(self, *args: Any) -> Any:
        try:
            with _saving(self._member.saves):
                return super().switch(*args)
        except BaseException:
            self._member.has_failed = True
            raise


class _Joined(Batcher):  # type: ignore[misc]
    """The rows of several traces, which are encoded already."""

    def __init__(self, envoy: Envoy, edits: Edits) -> None:
        super().__init__(envoy)
        self._edits = edits
        self._encodings: list[Mapping[str, torch.Tensor]] = []

    def join(self, encoding: Mapping[str, torch.Tensor]) -> list[int]:
        """Add the rows of a trace, and return their place."""
        group = [self.total, len(encoding["input_ids"])]
        self.total += group[1]
        self.invokes.append(((), {}))
        self._encodings.append(encoding)
        return group

    def _widen_tensor(
        self, full: torch.Tensor, group: list[int], edited: torch.Tensor
    ) -> torch.Tensor:
        rows = full.narrow(0, *group) if full.shape[0] == self.total else full
        if _place(rows) == _place(edited):  # it was written into
            return full
        if self._edits is Edits.IN_PLACE:
            raise ValueError("another value was assigned")
        widened: torch.Tensor = super()._widen_tensor(full, group, edited)
        return widened

    def assemble(self, fn: Any) -> tuple[tuple[()], dict[str, torch.Tensor]]:
        return (), {
            name: torch.cat([each[name] for each in self._encodings]) for name in self._encodings[0]
        }


def _groups(members: Sequence[_Member]) -> Iterator[list[_Member]]:
    """Yield the traces that share a pass, several each."""
    of_shape = defaultdict(list)
    for each in members:
        of_shape[each.shape].append(each)
    for shape, alike in of_shape.items():
        groups: list[list[_Member]] = [[]]
        rows = 0
        for each in alike:
            rows += len(each.encoding["input_ids"])
            if rows * shape[-1] > _MOST_TOKENS:
                groups.append([])
                rows = len(each.encoding["input_ids"])
            groups[-1].append(each)
        yield from (group for group in groups if len(group) > 1)


def _kind_of(value: Any) -> Kind:
    """Return the kind of a value that a block takes from its script."""
    if type(value) in (Envoy, *_MODELS):
        return Kind.PART
    if any(value is each for each in _NAMESPACES):
        return Kind.TORCH
    if value is nnsight:
        return Kind.NNSIGHT
    return Kind.OWN if _is_plain(value) else Kind.OTHER


def _is_plain(value: Any, depth: int = 4) -> bool:
    if type(value) in (list, tuple, set):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    if type(value) is dict:
        return depth > 0 and all(_is_plain(each, depth - 1) for each in [*value, *value.values()])
    return type(value) in (*_PLAIN, range, slice)


@contextlib.contextmanager
def _saving(saves: set[int]) -> Iterator[None]:
    """Let nnsight keep ids of saved objects in this set: an id is used again once its object is gone."""
    before = tracing._saves()
    tracing._local.saves = saves
    try:
        yield
    finally:
        tracing._local.saves = before


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _outline(value: Any) -> Any:
    """Return what an edit may not change of the values of a pass."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return type(value), [_outline(each) for each in value]
    if isinstance(value, dict):
        return type(value), {name: _outline(each) for name, each in value.items()}
    return type(value)


class _Copies:
    """Copies of saved values without the rows of others, which a view of a pass would bring along."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Return a value in which each view is a copy; views of one place stay one.

        Raises:
            TypeError: If the value may have a tensor that is not looked at.
        """
        if isinstance(value, torch.Tensor):
            size = value.untyped_storage().nbytes()
            if value.is_contiguous() and size == value.numel() * value.element_size():
                return value
            if _place(value) not in self._made:
                copy = value.detach().clone()
                self._made[_place(value)] = copy.requires_grad_(value.requires_grad)
            return self._made[_place(value)]
        if type(value) in (list, tuple, set):
            return type(value)(map(self.of, value))
        if type(value) is dict:
            return {name: self.of(each) for name, each in value.items()}
        if type(value) not in (*_PLAIN, range, torch.Size):
            raise TypeError(type(value).__name__)
        return value


# The locations of a model


@dataclass(frozen=True)
class Locations:
    """The places of a model, such as `model.lm_head.output`, that several traces may share."""

    row_wise: frozenset[str] = frozenset()
    """Places that have a row for each prompt, the same as in a pass of that prompt alone."""
    kept: frozenset[str] = frozenset()
    """Places among these into whose values the model does not write later."""

    def of(self, edits: Edits) -> frozenset[str]:
        """Return the places of which blocks that edit in this way may have values."""
        return self.kept if edits is Edits.ASSIGNED else self.row_wise


def _locations(model: TransformersModel) -> Locations:
    """Compare a pass of several prompts with one of each, at every module."""
    config = model._module.config
    if getattr(config, "quantization_config", None) is not None:
        return Locations()
    if any("expert" in name for name in config.to_dict()):
        return Locations()
    size = model._module.get_input_embeddings().num_embeddings
    rows = torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS) * 7919 % size
    alone = [_seen(model, row[None]) for row in rows]
    together = _seen(model, rows)
    row_wise = frozenset(
        location
        for location, seen in together.items()
        if all(
            location in each and _has_row(seen.value, at, each[location].value)
            for at, each in enumerate(alone)
        )
    )
    return Locations(row_wise, frozenset(each for each in row_wise if together[each].is_kept))


@dataclass
class _Seen:
    """Values of a pass at one place."""

    value: Any
    """A copy."""
    there: list[tuple[torch.Tensor, int]]
    """The tensors themselves, and how often each had been written into."""

    @property
    def is_kept(self) -> bool:
        """Return True if nothing was written into the tensors since."""
        return all(tensor._version == version for tensor, version in self.there)


def _seen(model: TransformersModel, rows: torch.Tensor) -> dict[str, _Seen]:
    """Return what a pass has at each module: its first input and its output."""
    seen: dict[str, _Seen] = {}
    hooks = []

    def see(location: str, value: Any) -> None:
        if location not in seen:
            there: list[tuple[torch.Tensor, int]] = []
            seen[location] = _Seen(_copied(value, there), there)

    def watch(path: str, module: torch.nn.Module) -> None:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            see(f"{path}.input", first_input(args, kwargs))

        def after(_: Any, __: Any, output: Any) -> None:
            see(f"{path}.output", output)

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


def _copied(value: Any, there: list[tuple[torch.Tensor, int]]) -> Any:
    """Return a copy of what a module takes or gives, `_OTHER` where that is no tensor; note the tensors.

    A list is no tensor either: an item that is assigned in one is another one's in a copy.
    """
    if isinstance(value, torch.Tensor):
        there.append((value, value._version))
        return value.detach().clone()
    if type(value) is tuple:
        return tuple(_copied(each, there) for each in value)
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
        return bool(difference <= _rounding(value.dtype) * alone.double().norm())
    if isinstance(value, tuple) and isinstance(alone, tuple):
        return len(value) == len(alone) and all(
            _has_row(each, at, other) for each, other in zip(value, alone, strict=True)
        )
    return value is None and alone is None


def _rounding(dtype: torch.dtype) -> float:
    """Return the part of a value by which another order of its sums may change it."""
    eps = torch.finfo(dtype).eps
    return max(4 * eps, 1e-4)
