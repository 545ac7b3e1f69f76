"""A cache of the part of a payload that is the same in every request for a model.

nnsight sends the tree of a model's wrappers with each request: of 16,000 pickle opcodes for 30 layers, all
but 300 are in one list, and its bytes are the same as long as client and model are the same. The zygote
decodes that list once, from a request of its own; each runner that it forks uses the decoded objects for
one payload.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ndif.sandbox.protector.names import words
from ndif.sandbox.protector.unpickling import GlobalResolver, SafeUnpickler

_MIN_BYTES = 1024
"""Length below which decoding a list costs no more than looking for it."""
_SIGNATURE_BYTES = 64
"""Bytes by which the beginning of a cached list is found in a payload."""

_FRAME_BYTES, _PROTO_BYTES = 9, 2

_OPCODES = words("""
    MARK MEMOIZE BINGET LONG_BINGET BINPERSID FRAME NONE NEWTRUE NEWFALSE BININT BININT1 BININT2
    BINFLOAT SHORT_BINUNICODE BINUNICODE STACK_GLOBAL NEWOBJ BUILD EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3
    TUPLE EMPTY_LIST EMPTY_DICT APPEND APPENDS SETITEM SETITEMS
""")
"""Opcodes of a list that may be cached: none calls a function, whose result may differ each time."""


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """The place of a cacheable list in a payload."""

    start: int
    """Offset of the mark that the list begins with."""
    end: int
    """Offset behind the opcode that appends all items."""
    memo_size: int
    """Number of objects in the unpickler's memo before `start`."""
    references: frozenset[int]
    """Memo numbers below `memo_size` that the list refers to."""

    def contains(self, position: int) -> bool:
        """Return True if the opcode that ends at `position` is part of the list."""
        return self.start < position <= self.end


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The bytes of a list, the objects that they decode to, and what that decoding depended on."""

    content: bytes
    """The pickle opcodes without FRAME, which may begin anywhere."""
    memo_size: int
    referenced: Mapping[int, Any]
    persistent: Mapping[str, Any]
    items: list[Any]
    memo: list[Any]
    """Objects that the list adds to the memo, in their order."""

    def find(self, payload: bytes) -> int:
        """Return the offset behind the mark of the first possible match; 0 if there is none."""
        return payload.find(self.content[:_SIGNATURE_BYTES]) + 1

    def applies(self, memo: Mapping[int, Any], persistent: Mapping[str, Any]) -> bool:
        """Return True if the content decodes to the same objects after what `memo` holds."""
        return (
            len(memo) == self.memo_size
            and all(_same(memo.get(number), each) for number, each in self.referenced.items())
            and all(persistent.get(pid) is each for pid, each in self.persistent.items())
        )

    def match(self, payload: bytes, start: int) -> int | None:
        """Return the offset behind the content that begins at `start`; None if the bytes differ."""
        at, done = start, 0
        for frame in frame_offsets(payload):
            if frame <= at:
                continue
            piece = self.content[done : done + frame - at]
            if len(piece) < frame - at:
                break
            if not payload.startswith(piece, at):
                return None
            at, done = frame + _FRAME_BYTES, done + len(piece)
        rest = self.content[done:]
        return at + len(rest) if payload.startswith(rest, at) else None


def _same(given: Any, expected: Any) -> bool:
    return given is expected or (type(given) is type(expected) is str and given == expected)


def frame_offsets(payload: bytes) -> list[int]:
    """Return the offsets of the FRAME opcodes, as far as frames follow each other."""
    offsets, position = [], _PROTO_BYTES
    while payload[position : position + 1] == pickle.FRAME:
        offsets.append(position)
        size = int.from_bytes(payload[position + 1 : position + _FRAME_BYTES], "little")
        position += _FRAME_BYTES + size
    return offsets


def longest_list(payload: bytes) -> PrefixSpan | None:
    """Return the longest list of a trusted payload; None if it is short or calls functions."""
    opcodes = [
        (opcode, argument, position or 0)
        for opcode, argument, position in pickletools.genops(payload)
    ]
    marks: list[tuple[int, int]] = []
    start = end = before = memo_size = 0
    for opcode, _, position in opcodes:
        if opcode.name == "MEMOIZE":
            memo_size += 1
        elif opcode.name == "MARK":
            marks.append((position, memo_size))
        elif pickletools.markobject in opcode.stack_before:
            mark, earlier = marks.pop()
            if opcode.name == "APPENDS" and position + 1 - mark > end - start:
                start, end, before = mark, position + 1, earlier
    within = [(opcode.name, argument) for opcode, argument, at in opcodes if start <= at < end]
    if end - start < _MIN_BYTES or not _OPCODES.issuperset(name for name, _ in within):
        return None
    numbers = {argument or 0 for name, argument in within if name in ("BINGET", "LONG_BINGET")}
    return PrefixSpan(start, end, before, frozenset(each for each in numbers if each < before))


def _without_frames(payload: bytes, span: PrefixSpan) -> bytes:
    content, at = b"", span.start
    for frame in frame_offsets(payload):
        if span.start < frame < span.end:
            content += payload[at:frame]
            at = frame + _FRAME_BYTES
    return content + payload[at : span.end]


def cache_prefix(
    payload: bytes, resolver: GlobalResolver, persistent: Mapping[str, Any]
) -> CachedPrefix | None:
    """Decode what requests like `payload`, one of the server's own, have in common; None if little."""
    span = longest_list(payload)
    if span is None:
        return None
    recorder = _PrefixRecorder(span, io.BytesIO(payload), resolver, persistent)
    items = recorder.load()
    if not recorder.is_reusable:
        return None
    return CachedPrefix(
        content=_without_frames(payload, span),
        memo_size=span.memo_size,
        referenced={number: recorder.memo[number] for number in span.references},
        persistent=recorder.found,
        items=items,
        memo=[recorder.memo[number] for number in range(span.memo_size, len(recorder.memo))],
    )


class _PrefixRecorder(SafeUnpickler):
    """Decodes a payload up to the end of a list, and returns the items of that list."""

    def __init__(self, span: PrefixSpan, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._span = span
        self.found: dict[str, Any] = {}
        """Persistent objects that the list refers to."""
        self.is_reusable = True
        """False once the list names a global that differs from request to request."""

    def persistent_load(self, pid: Any) -> Any:
        """Load a persistent object, and record it if the list refers to it."""
        value = super().persistent_load(pid)
        if self._span.contains(self._file.tell()):
            self.found[pid] = value
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global, and record if it belongs to one request only."""
        inside = self._span.contains(self._file.tell())
        if inside and not self._resolver.is_request_independent(module, name):
            self.is_reusable = False
        return super().find_class(module, name)

    def _load_appends(self) -> None:
        if self._file.tell() == self._span.end:
            raise pickle._Stop(self.pop_mark())  # type: ignore[attr-defined]
        super()._load_appends()

    dispatch: ClassVar[dict[int, Any]] = {
        **SafeUnpickler.dispatch,
        pickle.APPENDS[0]: _load_appends,
    }


class PrefixUnpickler(SafeUnpickler):
    """An unpickler that takes the objects of a cached list instead of decoding it."""

    def __init__(self, cache: list[CachedPrefix], *arguments: Any) -> None:
        """`cache` holds one prefix or none; the payload that uses the prefix removes it."""
        super().__init__(*arguments)
        self._cache = cache

    def _find_prefix(self, content: bytes) -> int:
        return self._cache[0].find(content) if self._cache else 0

    def _skip_prefix(self, content: bytes, position: int) -> int | None:
        prefix = self._cache[0]
        end = prefix.match(content, position - 1)
        if end is None or not prefix.applies(self.memo, self._persistent):
            return None
        # The cached objects become the objects of this request.
        self._cache.clear()
        self.memo.update(enumerate(prefix.memo, prefix.memo_size))
        self._growable().extend(prefix.items)
        return end
