"""The state of a model that a reset between two requests restores or checks."""

from __future__ import annotations

import ctypes
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from transformers import PreTrainedConfig

from ndif.runtime.process.namespaces import DictVersions, copied, has_same_members
from ndif.runtime.process.procfs import ProcFiles


class ResetError(Exception):
    """The process cannot be reset; the message names the effect that the request left."""


class ModuleTreeState:
    """The state of the module tree and the objects around it, for `restore`."""

    def __init__(self, model: Any) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._copies: list[dict[Any, Any]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._kinds: list[tuple[Any, type]] = []
        known_ids: set[int] = set()
        for owner in (model, *model._module.modules(), *_neighbours(model)):
            self._kinds.append((owner, type(owner)))
            # A namespace and the dictionaries in it: parameters, buffers, hooks.
            within = [value for value in vars(owner).values() if issubclass(type(value), dict)]
            for members in [vars(owner), *within]:
                if id(members) not in known_ids:
                    known_ids.add(id(members))
                    self._dicts.append(members)
                    self._copies.append(copied(members))
                    lists = [value for value in dict.values(members) if type(value) is list]
                    self._lists += [(value, list(value)) for value in lists]
        inner = getattr(getattr(model, "tokenizer", None), "_tokenizer", None)
        self._tokenizer = _TokenizerState(inner) if hasattr(inner, "get_vocab_size") else None
        self._versions = DictVersions(self._dicts)
        self._tensors = _tensors(model._module)
        # While these storages are alive, no other storage can have their addresses.
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._trains = [tensor.requires_grad for tensor in self._tensors]
        self._forms = _forms(self._tensors)
        self._attributes = list(map(vars, self._tensors))
        self._attribute_copies = list(map(copied, self._attributes))
        self._attribute_versions = DictVersions(self._attributes)

    def restore(self) -> None:
        """Restore the state; raise ResetError if a weight or the tokenizer was changed."""
        for owner, kind in self._kinds:
            if type(owner) is not kind:  # torch's parametrizations give a module another class
                owner.__class__ = kind
        for at in self._versions.changed():
            now, before = self._dicts[at], self._copies[at]
            if not has_same_members(now, before):
                # A subclass may override these methods; only OrderedDict's own methods maintain its order.
                kind = OrderedDict if isinstance(now, OrderedDict) else dict
                kind.clear(now)
                kind.update(now, before)
        self._versions.record()
        for items, before_items in self._lists:
            items[:] = before_items
        if self._tokenizer is not None:
            self._tokenizer.restore()
        self._restore_tensors()

    def _restore_tensors(self) -> None:
        """Restore `requires_grad` and drop gradients; raise ResetError if a weight was changed.

        Each property is read for all weights at once, because there are hundreds of weights.
        """
        tensors = self._tensors
        if _forms(tensors) != self._forms:
            raise ResetError("a weight was replaced")
        if not all(map(is_, map(vars, tensors), self._attributes)):
            raise ResetError("a weight has other attributes")
        for at in self._attribute_versions.changed():
            if not has_same_members(self._attributes[at], self._attribute_copies[at]):
                raise ResetError("a weight has other attributes")
        self._attribute_versions.record()
        if not all(map(_IS_LEAF, tensors)) or any(map(_HOOKS, tensors)):
            raise ResetError("a weight belongs to a graph")
        if any(map(_GRADIENT_HOOKS, tensors)):
            raise ResetError("a weight has a hook")
        for tensor, trains, now in zip(tensors, self._trains, map(_TRAINS, tensors), strict=True):
            if now is not trains:
                tensor.requires_grad_(trains)
        for tensor, gradient in zip(tensors, map(_GRADIENT, tensors), strict=True):
            if gradient is not None:
                tensor.grad = None


_IS_LEAF, _TRAINS, _GRADIENT = map(attrgetter, ("is_leaf", "requires_grad", "grad"))
_HOOKS, _GRADIENT_HOOKS = map(attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks"))


def _forms(tensors: list[torch.Tensor]) -> list[list[Any]]:
    """Return the type, memory and layout of each tensor."""
    return [list(map(read, tensors)) for read in _READS]


_READS: tuple[Callable[[Any], Any], ...] = (
    type,
    attrgetter("dtype", "shape"),
    *map(methodcaller, ("data_ptr", "stride", "storage_offset")),
)


class _TokenizerState:
    """The native state of a tokenizer (`tokenizers`), which no Python attribute shows."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._state = self._read()
        self._padding, self._truncation = inner.padding, inner.truncation

    def _read(self) -> list[Any]:
        inner = self._inner
        parts = (inner.normalizer, inner.pre_tokenizer, inner.post_processor, inner.decoder)
        return [
            inner.get_vocab_size(with_added_tokens=True),
            {number: str(token) for number, token in inner.get_added_tokens_decoder().items()},
            [None if part is None else part.__getstate__() for part in parts],
            [getattr(inner.model, name, None) for name in ("dropout", "unk_token", "fuse_unk")],
            inner.encode_special_tokens,
        ]

    def restore(self) -> None:
        """Restore padding and truncation; raise ResetError if the vocabulary or the pipeline changed."""
        inner = self._inner
        if inner.padding != self._padding:
            inner.enable_padding(**self._padding) if self._padding else inner.no_padding()
        if inner.truncation != self._truncation:
            if self._truncation:
                inner.enable_truncation(**self._truncation)
            else:
                inner.no_truncation()
        if self._read() != self._state:
            raise ResetError("the tokenizer was changed")


def _neighbours(model: Any) -> Iterator[Any]:
    """Yield the model's configurations, interleaver and tokenizer, if they have Python attributes."""
    for owner in (model._module, model):
        for name in ("config", "generation_config", "interleaver", "_interleaver", "tokenizer"):
            neighbour = getattr(owner, name, None)
            if type(getattr(neighbour, "__dict__", None)) is dict:
                yield neighbour
                # The configurations of the model's parts, such as its text model.
                yield from (
                    config
                    for config in vars(neighbour).values()
                    if isinstance(config, PreTrainedConfig)
                )


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters, its buffers, and the tensors that are plain attributes."""
    attributes = [value for part in module.modules() for value in vars(part).values()]
    plain = [value for value in attributes if isinstance(value, torch.Tensor)]
    tensors = [*module.parameters(), *module.buffers(), *plain]
    return list({id(tensor): tensor for tensor in tensors}.values())


class WeightsMemory:
    """The weights in this process's memory, which `check` checks for writes.

    A write to a shared page gives this process a private copy, which the page map shows. Pages that were
    private before, and the ends of a range that fill no whole page, are compared with copies.
    The weight owner verifies weights on GPUs.
    """

    def __init__(self, module: torch.nn.Module, proc_files: ProcFiles) -> None:
        self._proc_files = proc_files
        self._whole: list[tuple[int, int, Any]] = []
        """Ranges of whole pages, with a mask of the pages that were private before."""
        self._copies: list[tuple[int, bytes]] = []
        for start, end in _ranges(module):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            last = end // mmap.PAGESIZE * mmap.PAGESIZE
            if last <= first:
                self._copy(start, end)
                continue
            self._copy(start, first)
            self._copy(last, end)
            own = proc_files.own_pages(first, last)
            for page in own.nonzero()[0].tolist():
                at = first + page * mmap.PAGESIZE
                self._copy(at, at + mmap.PAGESIZE)
            self._whole.append((first, last, own))

    def _copy(self, start: int, end: int) -> None:
        if end > start:
            self._copies.append((start, ctypes.string_at(start, end - start)))

    def check(self) -> None:
        """Raise ResetError if a weight was written to."""
        written = any(
            (self._proc_files.own_pages(start, end) & ~own).any() for start, end, own in self._whole
        )
        if written or any(ctypes.string_at(at, len(was)) != was for at, was in self._copies):
            raise ResetError("a weight was written to")


def _ranges(module: torch.nn.Module) -> list[tuple[int, int]]:
    """Return the address ranges of a module's weights on the CPU, with adjacent ranges merged."""
    storages = [
        tensor.untyped_storage() for tensor in _tensors(module) if tensor.device.type == "cpu"
    ]
    ranges: list[tuple[int, int]] = []
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(start + size, ranges[-1][1]))
        elif size:
            ranges.append((start, start + size))
    return ranges
