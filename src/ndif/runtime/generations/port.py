"""The port to an nnsight generation: the interface through which a model process loads and runs a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from ndif.runtime.spec import ModelSpec

if TYPE_CHECKING:
    from ndif.runtime.weights.weights import Placement


@dataclass(frozen=True, slots=True)
class ClientStream:
    """The two directions in which a hybrid job exchanges data with its client while it runs."""

    send: Callable[[bytes], None]
    receive: Callable[[], bytes]


Rebuilders = Mapping[tuple[str, str], Any]
"""Replacements for functions and classes that a pickle names, by module and name."""


class CodePolicy(Protocol):
    """The rules for a request's code and payload; `ndif.sandbox.protector.Protector` implements them."""

    def objects(self, persistent: Mapping[str, Any]) -> dict[str, Any]:
        """Register the server's objects that a payload may refer to, and return them."""
        ...

    def unpickler(self, ordinary: Any, rebuilders: Rebuilders) -> Any:
        """Return the class to use in place of the unpickler class `ordinary`."""
        ...

    def caching_prefix(self) -> AbstractContextManager[None]:
        """Treat payloads as the server's own while the context lasts, and cache how they begin.

        Payloads that later reach forks of this process begin in the same way.
        """
        ...

    def guarding(
        self, modules: Sequence[ModuleType], replaced: Sequence[tuple[Any, str, Any]] = ()
    ) -> AbstractContextManager[None]:
        """Treat everything that `modules` compile and run as a user's code while the context lasts.

        Args:
            modules: Modules of nnsight.
            replaced: Further attributes to replace meanwhile: owner, name, value.
        """
        ...

    def compile(self, source: Any, filename: str, mode: str) -> CodeType:
        """Compile a user's code.

        Raises:
            SyntaxError: if the source is not Python, or uses more than a request may.
        """
        ...

    def adopt(self, function: Any, names: Mapping[str, Any]) -> Any:
        """Return a user's function with globals of its own that contain `names`."""
        ...

    def fill(self, function: Any, names: Mapping[str, Any]) -> None:
        """Add `names` to the globals of an adopted function."""
        ...

    def runs(self, function: Any) -> bool:
        """Return True if `function` was adopted."""
        ...

    def scope(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of `names` that a payload may give to its code."""
        ...

    def filename(self, name: str) -> str:
        """Return the file name under which a user's code is known on this server."""
        ...

    def check_call(self, name: str) -> None:
        """Check that a request may call the model's method `name`.

        Raises:
            AttributeError: if not.
        """
        ...


class Generation(Protocol):
    """One model, loaded and run by one nnsight generation."""

    model: Any
    """The nnsight wrapper."""

    def load(self, spec: ModelSpec) -> None:
        """Load the model that `spec` names onto its device."""
        ...

    def load_meta(self, spec: ModelSpec, placement: Placement) -> None:
        """Build the model as `load` does, but on the meta device; `install` adds the weights later.

        Args:
            spec: The model.
            placement: The devices that the weights will be on, and that the model reports as its own.
        """
        ...

    def move(self, placement: Placement) -> None:
        """Change the placement that a model from `load_meta` reports."""
        ...

    def warmup_payload(self, prompt: str) -> bytes:
        """Return a payload, not compressed, that runs `prompt` and saves the first part of the output."""
        ...

    def run(
        self,
        payload: bytes,
        env: Mapping[str, Any],
        stream: ClientStream,
        policy: CodePolicy | None = None,
    ) -> dict[str, Any]:
        """Run a decompressed payload and return its saved values by name.

        Args:
            payload: The request's body.
            env: The adapter and attention implementation that the request asks for.
            stream: The hybrid job's exchange with its client.
            policy: The rules for untrusted code; None for trusted code.

        Raises:
            PayloadError: if the payload is not a trace of this generation.
            BlockError: if the user's code raised.
        """
        ...

    def export(self, saves: dict[str, Any]) -> dict[str, Any]:
        """Return the saved values in the form that this generation's client expects."""
        ...

    def forget(self) -> None:
        """Remove the last run's entries from caches that the next run must not see."""
        ...
