"""A cache of the part of a payload that is the same in every request for a model.

nnsight sends the tree of a model's wrappers with each request: 16,000 pickle opcodes for 30 layers, all but
300 of them in one list or dictionary. While client and model are the same, the tree's bytes are the same
except for memo numbers: a block that sends one object more shifts all numbers.

The zygote checks that container once, in a request of its own (`unpickling.cache_prefix`). If a payload has
the same bytes, the unpickler in C decodes them in a fifth of the time. An idle process decodes them ahead
of the request.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ndif.sandbox.protector.names import words

_MIN_BYTES = 1024
"""Length below which decoding a container costs no more than finding it in a payload."""
_SAME_PART = 0.9
"""Fraction of the longest container's length above which a smaller container is cached instead.

The longest may be a model's wrapper, which also holds data that differs between clients, such as the
model's configuration."""
_ANCHOR_BYTES = 16
"""Minimum length of a piece without memo numbers by which a cached container is found in a payload."""

_FRAME_BYTES, _PROTO_BYTES = 9, 2
_LITTLE = 1 << 8
"""The first memo number that takes four bytes."""
_REFERENCE = pickle.BININT + b"%b" + pickle.BINPERSID
_EMPTY = {"APPENDS": pickle.EMPTY_LIST, "SETITEMS": pickle.EMPTY_DICT}
_NUMBER_BYTES = {pickle.BINGET: 1, pickle.LONG_BINGET: 4}

_OPCODES = words("""
    MARK MEMOIZE BINGET LONG_BINGET BINPERSID FRAME NONE NEWTRUE NEWFALSE BININT BININT1 BININT2
    BINFLOAT SHORT_BINUNICODE BINUNICODE STACK_GLOBAL NEWOBJ BUILD EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3
    TUPLE EMPTY_LIST EMPTY_DICT APPEND APPENDS SETITEM SETITEMS
""")
"""Opcodes of a container that may be cached: none calls a function, whose result may differ each time."""


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """The place of a cacheable container in a payload."""

    start: int
    """Offset of the MARK before the items."""
    end: int
    """Offset after the opcode that adds all items."""
    memo_size: int
    """Number of objects in the unpickler's memo before `start`."""
    empty: bytes
    """The opcode that makes the container: EMPTY_LIST or EMPTY_DICT."""
    gets: tuple[tuple[int, int], ...]
    """Offset and memo number of each opcode in the container that refers to an object of the memo."""

    @property
    def references(self) -> set[int]:
        """Return the memo numbers below `memo_size` that the container refers to."""
        return {number for _, number in self.gets if number < self.memo_size}

    def contains(self, position: int) -> bool:
        """Return True if the opcode that ends at `position` is part of the container."""
        return self.start < position <= self.end


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The bytes of a checked container, and the objects on which their meaning depends."""

    pieces: tuple[bytes, ...]
    """The bytes before, between and after the opcodes that refer to the memo."""
    numbers: tuple[int, ...]
    """The memo numbers of these opcodes."""
    memo_size: int
    """Number of objects in the memo before the container."""
    content: bytes
    """All of the bytes, with these numbers."""
    program: bytes
    """A pickle of the container alone, which loads earlier memo objects by number, or leaves them out."""
    referenced: Mapping[int, Any]
    """Objects of the memo before the container that it refers to, by number."""
    persistent: Mapping[str, Any]
    globals: Mapping[tuple[str, str], Any]
    _ahead: list[tuple[Any, list[Any]]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        payload: bytes,
        span: PrefixSpan,
        memo: Mapping[int, Any],
        persistent: Mapping[str, Any],
        named: Mapping[tuple[str, str], Any],
    ) -> CachedPrefix:
        """Return the cache of the container at `span` of a payload that was decoded with `memo`."""
        pieces, position = [], span.start
        for start, _ in span.gets:
            pieces.append(payload[position:start])
            position = start + 1 + _NUMBER_BYTES[payload[start : start + 1]]
        pieces.append(payload[position : span.end])
        referenced = {number: memo[number] for number in span.references}
        earlier = b"".join(
            (_REFERENCE % number.to_bytes(4, "little") if number in referenced else pickle.NONE)
            + pickle.MEMOIZE
            + pickle.POP
            for number in range(span.memo_size)
        )
        content = payload[span.start : span.end]
        return cls(
            pieces=tuple(pieces),
            numbers=tuple(number for _, number in span.gets),
            memo_size=span.memo_size,
            content=content,
            program=pickle.PROTO + b"\x04" + earlier + span.empty + content + pickle.STOP,
            referenced=referenced,
            persistent=persistent,
            globals=named,
        )

    def decode_ahead(self) -> None:
        """Decode a container for the next payload, unless one is ready."""
        if not self._ahead:
            self._ahead.append(self._decoded())

    def forget(self) -> None:
        """Drop a decoded container that no payload has used."""
        self._ahead.clear()

    def decode(self, memo: Mapping[int, Any]) -> tuple[Any, dict[int, Any]]:
        """Return a fresh container, and `memo` extended by the objects that the container adds."""
        container, added = self._ahead.pop() if self._ahead else self._decoded()
        return container, {**memo, **dict(enumerate(added, len(memo)))}

    def _decoded(self) -> tuple[Any, list[Any]]:
        decoder = _Decoder(io.BytesIO(self.program))
        decoder.prefix = self
        container = decoder.load()
        return container, [*decoder.memo.copy().values()][self.memo_size :]

    def find(self, payload: bytes) -> range:
        """Return the offsets at which the container may begin; an empty range if `payload` lacks it."""
        least = most = 0
        for piece in self.pieces:
            if len(piece) >= _ANCHOR_BYTES:
                position = payload.find(piece)
                return range(max(position - most - _FRAME_BYTES, 0), position - least + 1)
            least += len(piece) + len(_get(0))
            most += len(piece) + len(_get(_LITTLE))
        return range(0)

    def match(
        self, payload: bytes, start: int, memo: Mapping[int, Any], persistent: Mapping[str, Any]
    ) -> int | None:
        """Return the offset after this container if it begins at `start`; None if another one does."""
        most = len(self.content) + len(self.numbers) * len(_get(_LITTLE))
        content, frames = _without_frames(payload, start, most)
        if len(memo) == self.memo_size and content.startswith(self.content):
            earlier, expected = {number: number for number in self.referenced}, self.content
        else:
            earlier = self._numbers_in(content)
            if len(earlier) < len(self.referenced):
                return None
            expected = self._with_numbers(earlier, len(memo) - self.memo_size)
        same = (
            content.startswith(expected)
            and all(
                _same(memo.get(earlier[number]), value) for number, value in self.referenced.items()
            )
            and all(persistent.get(pid) is value for pid, value in self.persistent.items())
        )
        if not same:
            return None
        end = start + len(expected)
        for frame in frames:
            end += _FRAME_BYTES if frame < end else 0
        return end

    def _numbers_in(self, content: bytes) -> dict[int, int]:
        """Map memo numbers in `referenced` to numbers in `content`; incomplete for another container."""
        position, earlier = 0, dict[int, int]()
        for piece, number in zip(self.pieces, self.numbers, strict=False):
            position += len(piece)
            width = _NUMBER_BYTES.get(content[position : position + 1])
            if len(earlier) == len(self.referenced) or width is None:
                break
            if number in self.referenced:
                earlier.setdefault(
                    number, int.from_bytes(content[position + 1 : position + 1 + width], "little")
                )
            position += 1 + width
        return earlier

    def _with_numbers(self, earlier: Mapping[int, int], shift: int) -> bytes:
        """Return this container's bytes after a memo with other numbers."""
        gets = {
            number: _get(earlier.get(number, number + shift))
            for number in dict.fromkeys(self.numbers)
        }
        parts = [b""] * (len(self.pieces) + len(self.numbers))
        parts[::2], parts[1::2] = self.pieces, map(gets.__getitem__, self.numbers)
        return b"".join(parts)


class _Decoder(pickle.Unpickler):
    """The unpickler in C, with the globals and persistent objects of a checked container."""

    prefix: CachedPrefix
    memo: Any

    def find_class(self, module: str, name: str) -> Any:
        return self.prefix.globals[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return an object of the server by name, or an object of the memo by number."""
        objects: Mapping[Any, Any]
        objects = self.prefix.referenced if isinstance(pid, int) else self.prefix.persistent
        return objects[pid]


def _same(actual: Any, expected: Any) -> bool:
    return actual is expected or (type(actual) is type(expected) is str and actual == expected)


def _get(number: int) -> bytes:
    """Return the opcode that a pickler writes to refer to an object of the memo."""
    if number < _LITTLE:
        return pickle.BINGET + bytes((number,))
    return pickle.LONG_BINGET + number.to_bytes(4, "little")


def _without_frames(payload: bytes, start: int, size: int) -> tuple[bytes, list[int]]:
    """Return `size` bytes of a payload from `start` on without FRAMEs, and the offsets of the FRAMEs."""
    parts: list[bytes] = []
    frames: list[int] = []
    for frame in frame_offsets(payload):
        if frame >= start + size:
            break
        if frame >= start:
            parts.append(payload[start:frame])
            size -= frame - start
            start = frame + _FRAME_BYTES
            frames.append(frame)
    return b"".join((*parts, payload[start : start + size])), frames


def frame_offsets(payload: bytes) -> Iterator[int]:
    """Yield the offsets of the FRAME opcodes, while frames directly follow each other."""
    position = _PROTO_BYTES
    while payload[position : position + 1] == pickle.FRAME:
        yield position
        size = int.from_bytes(payload[position + 1 : position + _FRAME_BYTES], "little")
        position += _FRAME_BYTES + size


def without_frames(payload: bytes) -> bytes:
    """Return a trusted payload without FRAME opcodes, whose positions may vary."""
    return _without_frames(payload, 0, len(payload))[0]


def longest_container(payload: bytes) -> PrefixSpan | None:
    """Return the longest list or dictionary of a trusted payload without frames, or the bulk of it.

    Return None if that container is short. A container that calls functions does not count.
    """
    marks: list[tuple[int, int, int]] = []
    containers: list[tuple[int, int, int, bytes]] = []
    gets: list[tuple[int, int]] = []
    memo_size = calls = 0
    for opcode, argument, offset in pickletools.genops(payload):
        position = offset or 0
        calls += opcode.name not in _OPCODES
        if opcode.name == "MEMOIZE":
            memo_size += 1
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            gets.append((position, argument or 0))
        elif opcode.name == "MARK":
            marks.append((position, memo_size, calls))
        elif pickletools.markobject in opcode.stack_before:
            start, earlier, before = marks.pop()
            if calls == before and opcode.name in _EMPTY:
                containers.append((position + 1 - start, start, earlier, _EMPTY[opcode.name]))
    longest = max((size for size, *_ in containers), default=0)
    if longest < _MIN_BYTES:
        return None
    size, start, memo_size, empty = min(
        container for container in containers if container[0] >= _SAME_PART * longest
    )
    end = start + size
    within = tuple((at, number) for at, number in gets if start < at < end)
    return PrefixSpan(start, end, memo_size, empty, within)
