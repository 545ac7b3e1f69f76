"""Typed values as JSON: dataclasses, which msgspec writes, and checks when it reads them.

Untrusted code may have written the JSON. A model of pydantic, where a process has one, reads and writes
itself.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Bytes: JSON has integers that no float and no file holds."""


def to_json(value: Any) -> bytes:
    """Return a typed value as JSON; half of a surrogate pair, which no UTF-8 has, becomes a `?`."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
        return json.dumps(plain, ensure_ascii=False).encode(errors="replace")


def from_json(kind: type[T], text: bytes | str) -> T:
    """Read a value from JSON; unknown fields are ignored.

    Raises:
        ValueError: If the text is no value of this type; the message says which part is not.
    """
    value: T = read(decoder(kind), text)
    return value


def read(decoder: msgspec.json.Decoder[T], text: bytes | str) -> T:
    """Read a value with a decoder; see `from_json`."""
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def _model(kind: Any, content: Any) -> Any:
    return kind.model_validate(content)


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_model)


decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(_decoder)
"""Return the decoder of a type, made at its first use."""


def _plain(value: Any) -> Any:
    # msgspec takes no subclasses of these, such as a sentence that knows its limit.
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value.model_dump(mode="json", by_alias=True)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
