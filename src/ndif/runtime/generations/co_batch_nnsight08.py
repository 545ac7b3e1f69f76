"""Several traces of nnsight 0.8 in one forward pass.

nnsight runs the invokes of one trace in one pass, each with its own rows. Here each trace becomes such an
invoke, if three conditions hold. Its block is row-wise (`row_wise`). Its prompts have as many tokens as the
other prompts, so that none is padded. The values that its block reads and edits were observed to have a row
for each prompt, equal to a pass of that prompt alone up to rounding.

Any other trace, and any trace that raises an error, must run alone. Every trace of a model that is
quantized or has experts must run alone, too: the model's values in one row may depend on other rows.
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
from ndif.runtime.generations.row_wise import Edits, ExpressionKind, row_wise_edits
from ndif.runtime.generations.unsaved import Unsaved

_MAX_TOKENS = 4096
"""Most tokens in one pass; beyond that, separate passes take no longer."""
_ROWS, _TOKENS = 3, 5
"""Shape of the pass that explores a model: unusual sizes, chosen to differ from its dimensions."""
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
"""A reader of payloads, which returns a tracer or raises an error."""


class SharedPassRunner:
    """The shared passes of one model."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self._modules = frozenset(
            part for name, _ in model._module.named_modules() for part in name.split(".") if part
        )
        self._locations: Locations | None = None
        """Locations whose values a trace may access; None before they are determined."""

    def run(self, payloads: Sequence[bytes], read: Read) -> list[Saves | None]:
        """Run traces in shared passes; return their saved values, None for a trace that must run alone."""
        results: list[Saves | None] = [None] * len(payloads)
        waiting = list(range(len(payloads)))
        for _ in range(_ATTEMPTS):
            # Read again for each attempt, because a block fills containers in its payload.
            members = [self._member(at, payloads[at], read) for at in waiting]
            failed: set[int] = set()
            for group in _groups([member for member in members if member is not None]):
                try:
                    self._run(group)
                except Exception:
                    # The traces that did not cause the failure share another pass.
                    failed |= {member.at for member in group if not member.has_failed}
                else:
                    for member in group:
                        results[member.at] = member.values
            waiting = sorted(failed)
            if len(waiting) < 2:
                break
        return results

    def _member(self, at: int, payload: bytes, read: Read) -> _Member | None:
        """Return a trace that may share a pass; None if it must run alone."""
        try:
            tracer = read(payload)
            if not self._is_plain(tracer):
                return None
            edits = self._edits(tracer)
            args, encoding = tracer.envoy._batch([(tracer.args, tracer.kwargs)], tracer.fn)
        except Exception:  # running alone, the trace reports its error
            return None
        rows = encoding.get("input_ids")
        if edits is None or args or not isinstance(rows, torch.Tensor) or rows.dim() != 2:
            return None
        if not all(
            isinstance(tensor, torch.Tensor) and len(tensor) == len(rows)
            for tensor in encoding.values()
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
        """Return how a trace's block edits its rows; None if it is not row-wise."""
        frame = tracer.info.frame
        variables = {**frame.f_globals, **frame.f_locals}
        source = "".join(linecache.cache[frame.f_code.co_filename][2])  # type: ignore[misc]
        names = {name: _kind_of(value) for name, value in variables.items()}
        return row_wise_edits(source, names, self._modules)

    def _run(self, group: Sequence[_Member]) -> None:
        """Run traces in one pass and store their values; raise the error of the first that fails."""
        batcher = _JoinedBatcher(self._model, group[0].edits)
        interleaver = self._model.interleaver
        tracing.inc()
        try:
            for member in group:
                member.mediator = _Guarded(member, self.locations)
                member.mediator.batch_group = batcher.join(member.encoding)
                interleaver.mediators.append(member.mediator)
            self._model.interleave(self._model._call, batcher=batcher)
            for member in group:
                member.end()
        except Exception:
            if not any(member.has_failed for member in group):
                # The pass has ended, and a block still waits for a value.
                for member in group:
                    member.has_failed = (
                        member.mediator is None or member.mediator.pending is not None
                    )
            raise
        finally:
            interleaver.cancel()
            tracing.dec()

    @property
    def locations(self) -> Locations:
        """Return the locations whose values a trace may access; the first call runs a few passes."""
        if self._locations is None:
            try:
                self._locations = _locations(self._model)
            except Exception:  # the model takes other inputs than tokens
                self._locations = Locations()
        return self._locations


@dataclass(eq=False)
class _Member:
    """A trace in a pass."""

    at: int
    """Index of the payload."""
    tracer: Any
    edits: Edits
    encoding: Mapping[str, torch.Tensor]
    mediator: Any = None
    has_failed: bool = False
    saves: set[int] = field(default_factory=set)
    """Ids of the objects that the block has saved."""
    values: Saves | None = None
    """Values for the client; None if the trace must run alone."""
    _unsaved: Unsaved = field(init=False)

    def __post_init__(self) -> None:
        frame = self.tracer.info.frame
        self._unsaved = Unsaved(frame.f_globals, frame.f_locals)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the properties that all traces of a pass share; the last one is the number of tokens."""
        return self.edits, *sorted(self.encoding), self.encoding["input_ids"].shape[1]

    def end(self) -> None:
        """Collect the block's values after the pass."""
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
        if not list(hints):  # hints can only be printed if the trace runs alone
            with contextlib.suppress(TypeError):
                self.values = _Copies().of(values)


class _Guarded(Mediator):  # type: ignore[misc]
    """A block in a pass, without access to values that have no rows of its own."""

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
        """Serve the block's access to a location; raise an error if it could affect the rows of others."""
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


class _JoinedBatcher(Batcher):  # type: ignore[misc]
    """A batcher for the encoded rows of several traces."""

    def __init__(self, envoy: Envoy, edits: Edits) -> None:
        super().__init__(envoy)
        self._edits = edits
        self._encodings: list[Mapping[str, torch.Tensor]] = []

    def join(self, encoding: Mapping[str, torch.Tensor]) -> list[int]:
        """Add the rows of a trace; return their start and count."""
        group = [self.total, len(encoding["input_ids"])]
        self.total += group[1]
        self.invokes.append(((), {}))
        self._encodings.append(encoding)
        return group

    def _widen_tensor(
        self, full: torch.Tensor, group: list[int], edited: torch.Tensor
    ) -> torch.Tensor:
        rows = full.narrow(0, *group) if full.shape[0] == self.total else full
        if _memory_of(rows) == _memory_of(edited):  # edited in place
            return full
        if self._edits is Edits.IN_PLACE:
            raise ValueError("another value was assigned")
        widened: torch.Tensor = super()._widen_tensor(full, group, edited)
        return widened

    def assemble(self, fn: Any) -> tuple[tuple[()], dict[str, torch.Tensor]]:
        return (), {
            name: torch.cat([encoding[name] for encoding in self._encodings])
            for name in self._encodings[0]
        }


def _groups(members: Sequence[_Member]) -> Iterator[list[_Member]]:
    """Yield groups of at least two traces that can share a pass."""
    by_shape = defaultdict(list)
    for member in members:
        by_shape[member.shape].append(member)
    for shape, candidates in by_shape.items():
        groups: list[list[_Member]] = [[]]
        rows = 0
        for member in candidates:
            rows += len(member.encoding["input_ids"])
            if rows * shape[-1] > _MAX_TOKENS:
                groups.append([])
                rows = len(member.encoding["input_ids"])
            groups[-1].append(member)
        yield from (group for group in groups if len(group) > 1)


def _kind_of(value: Any) -> ExpressionKind:
    """Return the kind of a value that a block takes from its script."""
    if type(value) in (Envoy, *_MODELS):
        return ExpressionKind.PART
    if any(value is namespace for namespace in _NAMESPACES):
        return ExpressionKind.TORCH
    if value is nnsight:
        return ExpressionKind.NNSIGHT
    return ExpressionKind.OWN if _is_plain(value) else ExpressionKind.OTHER


def _is_plain(value: Any, depth: int = 4) -> bool:
    if type(value) in (list, tuple, set):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(_is_plain(item, depth - 1) for item in [*value, *value.values()])
    return type(value) in (*_PLAIN, range, slice)


@contextlib.contextmanager
def _saving(saves: set[int]) -> Iterator[None]:
    """Make nnsight record saved objects in this set; each trace has its own, because ids are reused."""
    before = tracing._saves()
    tracing._local.saves = saves
    try:
        yield
    finally:
        tracing._local.saves = before


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _outline(value: Any) -> Any:
    """Return the properties of a value that an edit must not change."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return type(value), [_outline(item) for item in value]
    if isinstance(value, dict):
        return type(value), {name: _outline(item) for name, item in value.items()}
    return type(value)


class _Copies:
    """Copies of saved values without the rows of other traces, which views of a pass would include."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Return a value with a copy of each view; identical views share one copy.

        Raises:
            TypeError: If the value has a type that may hide a tensor.
        """
        if isinstance(value, torch.Tensor):
            size = value.untyped_storage().nbytes()
            if value.is_contiguous() and size == value.numel() * value.element_size():
                return value
            if _memory_of(value) not in self._copies:
                copy = value.detach().clone()
                self._copies[_memory_of(value)] = copy.requires_grad_(value.requires_grad)
            return self._copies[_memory_of(value)]
        if type(value) in (list, tuple, set):
            return type(value)(map(self.of, value))
        if type(value) is dict:
            return {name: self.of(item) for name, item in value.items()}
        if type(value) not in (*_PLAIN, range, torch.Size):
            raise TypeError(type(value).__name__)
        return value


# The locations of a model


@dataclass(frozen=True)
class Locations:
    """The locations in a model, such as `model.lm_head.output`, that traces in a shared pass may access."""

    row_wise: frozenset[str] = frozenset()
    """Locations with a row for each prompt, equal to a pass of that prompt alone."""
    kept: frozenset[str] = frozenset()
    """Row-wise locations whose values the model does not modify later."""

    def of(self, edits: Edits) -> frozenset[str]:
        """Return the locations that blocks with such edits may access."""
        return self.kept if edits is Edits.ASSIGNED else self.row_wise


def _locations(model: TransformersModel) -> Locations:
    """Find the locations by comparing a pass of several prompts with a pass of each."""
    config = model._module.config
    if getattr(config, "quantization_config", None) is not None:
        return Locations()
    if any("expert" in name for name in config.to_dict()):
        return Locations()
    size = model._module.get_input_embeddings().num_embeddings
    rows = torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS) * 7919 % size
    alone = [_observe(model, row[None]) for row in rows]
    together = _observe(model, rows)
    row_wise = frozenset(
        location
        for location, observation in together.items()
        if all(
            location in values and _has_row(observation.value, at, values[location].value)
            for at, values in enumerate(alone)
        )
    )
    return Locations(
        row_wise, frozenset(location for location in row_wise if together[location].is_kept)
    )


@dataclass
class _Observation:
    """The value at one location of a pass."""

    value: Any
    """A copy of the value."""
    originals: list[tuple[torch.Tensor, int]]
    """The original tensors, with their versions at the time of the copy."""

    @property
    def is_kept(self) -> bool:
        """Return True if no tensor was modified since the copy."""
        return all(tensor._version == version for tensor, version in self.originals)


def _observe(model: TransformersModel, rows: torch.Tensor) -> dict[str, _Observation]:
    """Run a pass; return the first input and the output of each module, by location."""
    observations: dict[str, _Observation] = {}
    hooks = []

    def record(location: str, value: Any) -> None:
        if location not in observations:
            originals: list[tuple[torch.Tensor, int]] = []
            observations[location] = _Observation(_copied(value, originals), originals)

    def watch(path: str, module: torch.nn.Module) -> None:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            record(f"{path}.input", first_input(args, kwargs))

        def after(_: Any, __: Any, output: Any) -> None:
            record(f"{path}.output", output)

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(after))

    for part in (model, *model.modules()):
        watch(part.path, part._module)
    try:
        _, encoding = model._batch([((rows,), {})], model._call)
        device = model.device
        with torch.no_grad():
            model._module(**{name: tensor.to(device) for name, tensor in encoding.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return observations


_OTHER = object()


def _copied(value: Any, originals: list[tuple[torch.Tensor, int]]) -> Any:
    """Copy a module's input or output, and add its tensors to `originals`.

    Only tensors, tuples and None are copied. An item assigned in a copied list would miss the original.
    """
    if isinstance(value, torch.Tensor):
        originals.append((value, value._version))
        return value.detach().clone()
    if type(value) is tuple:
        return tuple(_copied(item, originals) for item in value)
    return None if value is None else _OTHER


def _has_row(value: Any, at: int, alone: Any) -> bool:
    """Return True if one row of a pass equals a pass of that row alone, up to rounding."""
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
            _has_row(item, at, other) for item, other in zip(value, alone, strict=True)
        )
    return value is None and alone is None


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative difference that another order of sums may cause."""
    eps = torch.finfo(dtype).eps
    return max(4 * eps, 1e-4)
