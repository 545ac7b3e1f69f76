"""A cache of the part of a payload that is the same in every request for a model.

nnsight sends the tree of a model's wrappers with each request: of 16,000 pickle opcodes for 30 layers, all
but 300 are in one list, and its bytes are the same as long as client and model are the same. The zygote
checks that list once, in a request of its own (`unpickling.cache_prefix`). Where a payload has the same
bytes, the unpickler in C decodes them, in a fifth of the time.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ndif.sandbox.protector.names import words

_MIN_BYTES = 1024
"""Length below which decoding a list costs no more than looking for it."""
_SIGNATURE_BYTES = 64
"""Bytes by which the beginning of a cached list is found in a payload."""

_FRAME_BYTES, _PROTO_BYTES = 9, 2
_REFERENCE = pickle.BININT + b"%b" + pickle.BINPERSID

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

    def content(self, payload: bytes) -> bytes:
        """Return the opcodes of the list without FRAME, which may begin anywhere."""
        content, at = b"", self.start
        for frame in frame_offsets(payload):
            if self.start < frame < self.end:
                content += payload[at:frame]
                at = frame + _FRAME_BYTES
        return content + payload[at : self.end]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The bytes of a list that was checked, and what their meaning depends on."""

    content: bytes
    memo_size: int
    referenced: Mapping[int, Any]
    """Objects of the memo that the list refers to, by number."""
    persistent: Mapping[str, Any]
    globals: Mapping[tuple[str, str], Any]

    def decode(self, memo: Mapping[int, Any]) -> tuple[list[Any], dict[int, Any]]:
        """Return new objects, the list's items, and a `memo` with all that the list adds to it."""
        # A pickle of the list alone: what was in the memo before comes by number, or is left out.
        earlier = b"".join(
            (
                _REFERENCE % number.to_bytes(4, "little")
                if number in self.referenced
                else pickle.NONE
            )
            + pickle.MEMOIZE
            + pickle.POP
            for number in range(self.memo_size)
        )
        program = pickle.PROTO + b"\x04" + earlier + pickle.EMPTY_LIST + self.content + pickle.STOP
        decoder = _Decoder(io.BytesIO(program))
        decoder.prefix = self
        items: list[Any] = decoder.load()
        whole: dict[int, Any] = decoder.memo.copy()
        whole.update((number, memo[number]) for number in memo if number < self.memo_size)
        return items, whole

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


class _Decoder(pickle.Unpickler):
    """The unpickler in C, with the globals and persistent objects of a list that was checked."""

    prefix: CachedPrefix
    memo: Any

    def find_class(self, module: str, name: str) -> Any:
        """Return what the list's global resolved to."""
        return self.prefix.globals[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return an object of the server, or one of the memo by its number."""
        known: Mapping[Any, Any]
        known = self.prefix.referenced if isinstance(pid, int) else self.prefix.persistent
        return known[pid]


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
