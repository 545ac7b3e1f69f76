"""The part of a payload that is the same in every request for a model.

nnsight sends the tree of a model's wrappers with each: of 16,000 opcodes for 30 layers all but 300, in one
list, and the same bytes as long as client and model are the same. What they make can be there before the
payload comes.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WORTH_BYTES = 1024
"""A shorter passage is read as soon as it is looked for."""

_FRAME, _FRAME_BYTES, _PROTO_BYTES = pickle.FRAME[0], 9, 2

_OPCODES = frozenset(
    [
        *("MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPERSID", "FRAME"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "STACK_GLOBAL", "NEWOBJ", "BUILD"),
        *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
        *("EMPTY_LIST", "EMPTY_DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    ]
)
"""What a passage may consist of: it calls no function, whose result might be another each time."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a passage is in a payload."""

    start: int
    """Where the mark is that its list begins with."""
    end: int
    """Behind the opcode that puts all of it into the list."""
    memo: int
    """How many objects the payload has numbered before."""
    referred: frozenset[int]
    """Which of those it refers to."""

    def within(self, position: int) -> bool:
        """Whether what was read up to `position` is a part of it."""
        return self.start < position <= self.end


@dataclass(frozen=True, slots=True)
class Passage:
    """The bytes of one, and what they make where all that they refer to is the same."""

    content: bytes
    """Without frames, which may begin anywhere."""
    numbered: int
    referred: Mapping[int, Any]
    persistent: Mapping[str, Any]
    items: list[Any]
    """What it puts into its list."""
    memo: list[Any]
    """The objects that it numbers."""

    def means_the_same(self, memo: Mapping[int, Any], persistent: Mapping[str, Any]) -> bool:
        """Whether it would make the same after what made `memo`."""
        return (
            len(memo) == self.numbered
            and all(_same(memo.get(number), each) for number, each in self.referred.items())
            and all(persistent.get(pid) is each for pid, each in self.persistent.items())
        )

    def end(self, payload: bytes, start: int) -> int | None:
        """Where it ends that begins at `start`; None where there is something else."""
        at, done = start, 0
        for frame in frames(payload):
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


def frames(payload: bytes) -> list[int]:
    """Where the opcodes are that begin a frame, as far as frames follow each other."""
    found, position = [], _PROTO_BYTES
    while payload[position : position + 1] == pickle.FRAME:
        found.append(position)
        size = int.from_bytes(payload[position + 1 : position + _FRAME_BYTES], "little")
        position += _FRAME_BYTES + size
    return found


def longest(payload: bytes) -> Span | None:
    """The passage of a payload that is to be trusted, the longest of its lists; None if that is short."""
    opcodes = [
        (opcode, argument, position or 0)
        for opcode, argument, position in pickletools.genops(payload)
    ]
    marks: list[tuple[int, int]] = []
    start = end = before = numbered = 0
    for opcode, _, position in opcodes:
        if opcode.name == "MEMOIZE":
            numbered += 1
        elif opcode.name == "MARK":
            marks.append((position, numbered))
        elif pickletools.markobject in opcode.stack_before:
            mark, earlier = marks.pop()
            if opcode.name == "APPENDS" and position + 1 - mark > end - start:
                start, end, before = mark, position + 1, earlier
    within = [(opcode.name, argument) for opcode, argument, at in opcodes if start <= at < end]
    if end - start < _WORTH_BYTES or not _OPCODES.issuperset(name for name, _ in within):
        return None
    numbers = {argument or 0 for name, argument in within if name in ("BINGET", "LONG_BINGET")}
    return Span(start, end, before, frozenset(number for number in numbers if number < before))


def without_frames(payload: bytes, span: Span) -> bytes:
    """The bytes of a passage."""
    content, at = b"", span.start
    for frame in frames(payload):
        if span.start < frame < span.end:
            content += payload[at:frame]
            at = frame + _FRAME_BYTES
    return content + payload[at : span.end]
