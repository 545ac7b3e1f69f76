"""Reads what the payloads to come will hold: see `passages`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

from ndif.sandbox.protector.passages import Passage, Span, longest, without_frames
from ndif.sandbox.protector.unpickling import Finder, SafeUnpickler


def foreseen(payload: bytes, finder: Finder, persistent: Mapping[str, Any]) -> Passage | None:
    """What requests like this one of the server's own have in common; None if it is little."""
    span = longest(payload)
    if span is None:
        return None
    reader = _Reader(io.BytesIO(payload), finder, persistent, span)
    items = reader.load()
    if not reader.lasting:
        return None
    return Passage(
        content=without_frames(payload, span),
        numbered=span.memo,
        referred={number: reader.memo[number] for number in span.referred},
        persistent=reader.found,
        items=items,
        memo=[reader.memo[number] for number in range(span.memo, len(reader.memo))],
    )


class _Reader(SafeUnpickler):
    """Reads as far as a passage goes, and gives what that puts into its list."""

    dispatch: ClassVar[dict[int, Any]] = dict(SafeUnpickler.dispatch)

    def __init__(
        self, file: io.BytesIO, finder: Finder, persistent: Mapping[str, Any], span: Span
    ) -> None:
        super().__init__(file, finder, persistent)
        self._span = span
        self.found: dict[str, Any] = {}
        """What it refers to of the server's."""
        self.lasting = True
        """Whether all that it names is the same for every request."""

    def persistent_load(self, pid: Any) -> Any:
        """See `SafeUnpickler`."""
        value = super().persistent_load(pid)
        if self._span.within(self._file.tell()):
            self.found[pid] = value
        return value

    def find_class(self, module: str, name: str) -> Any:
        """See `SafeUnpickler`."""
        if self._span.within(self._file.tell()) and not self._finder.lasts(module, name):
            self.lasting = False
        return super().find_class(module, name)

    def _load_appends(self) -> None:
        if self._file.tell() == self._span.end:
            raise pickle._Stop(self.pop_mark())  # type: ignore[attr-defined]
        super()._load_appends()

    dispatch[pickle.APPENDS[0]] = _load_appends
