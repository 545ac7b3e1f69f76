"""One class per nnsight generation, which loads a model, runs payloads and explains errors to users."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndif.runtime.messages import LoadedModel
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import explain
from ndif.sandbox.advice import send_along

if TYPE_CHECKING:
    from ndif.runtime.weights.weights import ModelDevices
    from ndif.sandbox.protector import Protector

_GENERATIONS = {
    "0.8": "ndif.runtime.generations.v08:Nnsight08",
    "0.7": "ndif.runtime.generations.v07:Nnsight07",
    "0.6": "ndif.runtime.generations.v07:Nnsight06",
}


def create_generation(name: str) -> Generation:
    """Return the generation `name` ("0.8") without a model; it needs the nnsight of that generation."""
    module, cls = _GENERATIONS[name].split(":")
    generation: Generation = getattr(importlib.import_module(module), cls)()
    return generation


_SOUGHT = "__ndif_sought__"
"""The attribute of a `ModuleNotFoundError` with the module and name that a payload refers to."""
# Keeps dataclasses.MISSING a singleton: unpickling would create a second instance, which a dataclass would
# take for a default value.
setattr(dataclasses._MISSING_TYPE, "__new__", lambda cls: dataclasses.MISSING)  # noqa: B010 - mypy

Saves = dict[str, Any]
"""The values that a block has saved, by name."""

_MAX_CONFIG_BYTES = 64 << 10
"""Largest `config.json` that is published; a config with thousands of labels is larger."""


@dataclass(frozen=True, slots=True)
class ClientStream:
    """The two directions of data exchange between a running hybrid job and its client."""

    send: Callable[[bytes], None]
    receive: Callable[[], bytes]


class Generation:
    """One model, loaded and run by one nnsight generation."""

    name: str
    model: Any = None
    """The model in nnsight's wrapper."""

    def load(self, spec: ModelSpec) -> None:
        """Load the model that `spec` names onto its device."""
        raise NotImplementedError

    def load_meta(self, spec: ModelSpec, placement: ModelDevices) -> None:
        """Build the model as `load` does, but on the meta device; `install` adds the weights later."""
        # nnsight 0.8's own meta model lacks the generation settings and the evaluation mode, and has the
        # tokenizer of another revision.
        self.load(replace(spec, device="meta"))
        self.move(placement)

    def move(self, placement: ModelDevices) -> None:
        """Set the placement of a model from `load_meta`."""
        placement.apply(self.model._module)

    def describe(self, spec: ModelSpec) -> LoadedModel:
        """Return the facts about the loaded model that its host may publish."""
        module = self.model._module
        return LoadedModel(
            class_name=type(module).__name__,
            parameters=sum(p.numel() for p in module.parameters()),
            dtype=str(module.dtype).removeprefix("torch."),
            device=str(module.device),
            task=getattr(self.model, "task", None),
            folder=str(spec.files),
            config=_read_config(spec.files / "config.json"),
        )

    def warmup_payload(self, prompt: str) -> bytes:
        """Return an uncompressed payload that runs `prompt` and saves the first part of the output."""
        payloads: list[bytes] = []
        _trace(self.model, prompt, lambda tracer: payloads.append(self.serialize(tracer)))
        return payloads[0]

    def serialize(self, tracer: Any) -> bytes:
        """Return the uncompressed payload that a client would send for a block."""
        raise NotImplementedError

    def run(self, payload: bytes, stream: ClientStream, policy: Protector | None = None) -> Saves:
        """Run a decompressed payload on the prepared model and return its saved values by name.

        Untrusted code runs under a policy.

        Raises:
            PayloadError: If the payload is not a trace of this generation.
            BlockError: If the user's code raised.
        """
        with nullcontext() if policy is None else self._guarding(policy):
            return self._run(payload, stream, policy)

    def run_together(self, payloads: Sequence[bytes]) -> list[Saves | None]:
        """Run trusted payloads in one forward pass of the prepared model; return saved values by name.

        None means the payload must be rerun individually; its run had no visible effects.
        """
        return [None] * len(payloads)

    def prepare(self, env: Mapping[str, Any]) -> bool:
        """Configure the model for a request; return True if that changed the model.

        `env` names an adapter and an attention implementation. Notes for the user are printed.

        Raises:
            PayloadError: If the model cannot be configured this way.
        """
        return False

    def _guarding(self, policy: Protector) -> AbstractContextManager[None]:
        """Apply `policy` to blocks, and the functions that they call, while the context lasts."""
        raise NotImplementedError

    def _run(self, payload: bytes, stream: ClientStream, policy: Protector | None) -> Saves:
        raise NotImplementedError

    def export(self, saves: Saves) -> Saves:
        """Return the saved values in the form that this generation's client expects."""
        return saves

    def forget(self) -> None:
        """Remove the last run's entries from caches that the next run must not see."""
        raise NotImplementedError


def _read_config(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint's `config.json`; None if it is too large, invalid or not encodable.

    Numbers that only Python's JSON has, such as infinity in Mamba's `time_step_limit`, become strings.
    """
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        return None

    def number(text: str) -> float | str:
        return value if math.isfinite(value := float(text)) else text

    try:
        config: dict[str, Any] = json.loads(
            path.read_text(encoding="utf-8"), parse_constant=str, parse_float=number
        )
        json.dumps(config, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return config


def _trace(model: Any, prompt: str, backend: Callable[[Any], None]) -> None:
    with model.trace(prompt, backend=backend):
        first = model.output[0].save()  # noqa: F841 - the result of the trace


class PayloadError(Exception):
    """The payload cannot be turned into a trace; the message explains that to its sender."""


class BlockError(Exception):
    """The user's block raised an error; `traceback` is the text for its author."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)
        self.traceback = traceback


@contextmanager
def unpickling_errors(generation: str) -> Iterator[None]:
    """Translate errors of unpickling a payload into PayloadError, or BlockError for a syntax error."""
    try:
        yield
    except PayloadError:
        raise
    except SyntaxError as error:
        # The error is in the user's own code and names a line of it.
        raise BlockError(explain(error, None, "")) from error
    except ModuleNotFoundError as error:
        absent = error.name or ""
        module, name = getattr(error, _SOUGHT, ("", ""))
        if module.partition(".")[0] != absent.partition(".")[0]:
            module, name = absent, ""  # the module itself is here, but an import within it failed
        raise PayloadError(
            f"The block uses the module {module!r}, which this server does not have. "
            f"{send_along(module, name)}."
        ) from error
    except Exception as error:
        raise PayloadError(_reason(error, generation)) from error


def find_class(unpickler: Any, module: str, name: str) -> Any:
    """Replace `Unpickler.find_class`: a ModuleNotFoundError also carries the name that is sought."""
    try:
        return pickle.Unpickler.find_class(unpickler, module, name)
    except ModuleNotFoundError as error:
        setattr(error, _SOUGHT, (module, name))
        raise


def explain_absent(reference: str) -> str:
    """Return the sentence about a reference to a part that the model does not have."""
    if "base_model" in reference.split("."):
        return (
            f"The block refers to {reference}, which the model here does not have: `base_model` is the "
            "wrapper that PEFT puts around a model, and nnsight did before 0.8.0. On your side run `pip "
            "install 'nnsight>=0.8.0'`, and name the adapter with `peft=`."
        )
    return (
        f"The block refers to {reference}, which the model here does not have. Does it use a second model, "
        "one whose modules differ from the server's, or a module that you attached to it? Use your own "
        "modules without attaching them."
    )


def _reason(error: Exception, generation: str) -> str:
    if isinstance(error, pickle.UnpicklingError) and type(error).__name__ == "ForbiddenError":
        return f"The request was refused: {error}."
    # nnsight 0.8 has its own exception class for an unknown id; 0.6 and 0.7 only have a message.
    missing = str(error).removeprefix("Unknown persistent id: ")
    if type(error).__name__ == "UnknownPersistentIdError" or missing != str(error):
        return explain_absent(missing)
    return (
        f"The request could not be read as an nnsight {generation} trace "
        f"({type(error).__name__}: {error}). It is truncated or damaged, or was made by a "
        "version of nnsight, transformers or Python whose objects this server cannot rebuild: "
        "compare them with nnsight.compare()."
    )
