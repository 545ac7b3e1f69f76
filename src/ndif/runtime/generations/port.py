"""What a runner asks of an nnsight generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, ModuleType
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


Rebuilders = Mapping[tuple[str, str], Any]
"""What stands for a function or class of a pickle, by module and name."""


class Policy(Protocol):
    """What the code and the payload of a request may do. `ndif.sandbox.protector` has one."""

    def objects(self, persistent: Mapping[str, Any]) -> dict[str, Any]:
        """Take note of what of the server's a payload may refer to; the same objects."""
        ...

    def unpickler(self, ordinary: Any, rebuilders: Rebuilders) -> Any:
        """What is to be used for the unpickler class `ordinary`."""
        ...

    def foreseeing(self) -> AbstractContextManager[None]:
        """While it lasts, payloads are the server's own, and like those that will come to its forks."""
        ...

    def guarding(
        self, modules: Sequence[ModuleType], replaced: Sequence[tuple[Any, str, Any]] = ()
    ) -> AbstractContextManager[None]:
        """While it lasts, what these modules compile and run is a user's code.

        `replaced` are further attributes that are others meanwhile: owner, name, value.
        """
        ...

    def compile(self, source: Any, filename: str, mode: str) -> CodeType:
        """Compile a user's code.

        Raises:
            SyntaxError: if it is not Python, or more than a request may run.
        """
        ...

    def adopt(self, function: Any, names: Mapping[str, Any]) -> Any:
        """A function of a user's, with globals of its own in which `names` are."""
        ...

    def fill(self, function: Any, names: Mapping[str, Any]) -> None:
        """Put more names into the globals of an adopted function."""
        ...

    def runs(self, function: Any) -> bool:
        """Whether a function was adopted."""
        ...

    def scope(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """The names that a payload may give to its code."""
        ...

    def filename(self, name: str) -> str:
        """The file name that a user's code is known by here."""
        ...

    def check_call(self, name: str) -> None:
        """See that a method of the model may be called by its name.

        Raises:
            AttributeError: if not.
        """
        ...


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

    def move(self, placement: Placement) -> None:
        """Have a model that `load_meta` built count as being at `placement` instead."""
        ...

    def run(
        self,
        payload: bytes,
        env: Mapping[str, Any],
        conversation: Conversation,
        policy: Policy | None = None,
    ) -> dict[str, Any]:
        """Run a decompressed payload under `policy`, or as it is; its saved values by name.

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
