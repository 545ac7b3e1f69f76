"""Writes what `torch.load` reads, without torch.

`torch.save`'s first format, which every torch still reads, is five pickles in a row: a magic number,
a protocol version, the writer's word sizes, the object, and the keys of the tensor storages that
follow. A status holds no tensor of ours, so the last is empty.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_SYSTEM = {
    "protocol_version": _PROTOCOL,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
_HEAD = b"".join(pickle.dumps(part, 2) for part in (_MAGIC, _PROTOCOL, _SYSTEM))
_TAIL = pickle.dumps([], 2)
# `torch.storage._load_from_bytes(content)` is how torch itself embeds one saved object in another.
_LOAD = b"ctorch.storage\n_load_from_bytes\n"


def dumps(fields: Mapping[str, object]) -> bytes:
    """A mapping of plain values, as `torch.load` bytes."""
    return b"".join((_HEAD, pickle.dumps(dict(fields), 2), _TAIL))


def dumps_with(fields: Mapping[str, object], name: str, content: bytes, *, load: bool) -> bytes:
    """`fields` with one more entry that holds `content`, written without a copy of its own.

    With `load` the entry's value is what `torch.load` makes of `content` (itself `torch.save` bytes)
    when the reader loads it; the writer never looks inside.
    """
    opened = pickle.dumps(dict(fields), 2)[:-1]
    key = pickle.dumps(name, 2)[2:-1]
    value = (pickle.BINBYTES8 + struct.pack("<Q", len(content)), content)
    call = (pickle.TUPLE1 + pickle.REDUCE) if load else b""
    return b"".join(
        (
            _HEAD,
            opened,
            key,
            _LOAD if load else b"",
            *value,
            call,
            pickle.SETITEM,
            pickle.STOP,
            _TAIL,
        )
    )
