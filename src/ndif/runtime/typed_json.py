"""Typed values as JSON: msgspec writes dataclasses, and checks them when it reads them.

The JSON may come from untrusted code. pydantic models use their own validation and serialization.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A size in bytes, bounded because JSON has integers that no float and no file size can hold."""


def to_json(value: Any) -> bytes:
    """Return a typed value as JSON; a lone surrogate, which UTF-8 cannot encode, becomes `?`."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_to_builtin)
        return json.dumps(plain, ensure_ascii=False).encode(errors="replace")


def from_json(kind: type[T], text: bytes | str) -> T:
    """Decode a value from JSON and ignore unknown fields.

    Raises:
        ValueError: If the text is not a value of this type; the message names the wrong part.
    """
    value: T = read(decoder(kind), text)
    return value


def read(decoder: msgspec.json.Decoder[T], text: bytes | str) -> T:
    """Decode a value with `decoder`; see `from_json`."""
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def _validate_model(kind: Any, content: Any) -> Any:
    return kind.model_validate(content)


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_validate_model)


decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(_decoder)
"""Return the decoder of a type, created on first use."""


def _to_builtin(value: Any) -> Any:
    # msgspec encodes no subclasses of these types; ndif has such a subclass of str.
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value.model_dump(mode="json", by_alias=True)


_ENCODER = msgspec.json.Encoder(enc_hook=_to_builtin)
