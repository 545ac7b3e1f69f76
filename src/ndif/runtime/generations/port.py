"""What a runner asks of an nnsight generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ndif.runtime.spec import ModelSpec

if TYPE_CHECKING:
    from ndif.runtime.weights import Placement


class PayloadError(Exception):
    """The payload cannot be turned into a trace; the message tells its sender why."""


class BlockError(Exception):
    """The user's block raised. `traceback` is the text its author should read."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)
        self.traceback = traceback


@dataclass(frozen=True, slots=True)
class Conversation:
    """How a hybrid job talks with its client while it runs."""

    send: Callable[[bytes], None]
    receive: Callable[[], bytes]


class Generation(Protocol):
    """One loaded model, spoken to through one nnsight generation."""

    model: Any
    """The nnsight wrapper."""

    def load(self, spec: ModelSpec) -> None:
        """Load the model that `spec` names onto its device."""
        ...

    def load_meta(self, spec: ModelSpec, placement: Placement) -> None:
        """Have the model as `load` does, but without weights, which are put in later.

        They will be where `placement` says, and the model counts as one that is there.
        """
        ...

    def run(
        self, payload: bytes, env: Mapping[str, Any], conversation: Conversation
    ) -> dict[str, Any]:
        """Run a decompressed payload; its saved values by name.

        Raises:
            PayloadError: if it is not a payload of this generation.
            BlockError: if the user's code raised.
        """
        ...

    def export(self, saves: dict[str, Any]) -> dict[str, Any]:
        """The saved values as this generation's client wants to find them."""
        ...

    def forget(self) -> None:
        """Drop what the last run left in caches that the next must not see."""
        ...
