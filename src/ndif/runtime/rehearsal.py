"""A whole request, run before anybody sends one: what a first one imports, builds and maps is then here.

In the zygote its forks share it. A forward pass alone leaves out how nnsight unpickles, compiles and
interleaves, and how torch writes a result, which together cost a fresh process as much again.
"""

from __future__ import annotations

import importlib
import sys

from ndif.runtime.generations import Conversation, Generation
from ndif.runtime.generations.port import Policy
from ndif.runtime.results import Result
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import sentence
from ndif.runtime.warming import start_threads, warm_up

_SAMPLES = {"0.8": "sample08", "0.7": "sample07", "0.6": "sample07"}
_PROMPT = "The Eiffel Tower is in the city of"
_SILENCE = Conversation(send=lambda _: None, receive=lambda: b"")
_ANY_SIZE = 1 << 62


class Rehearsal:
    """One request of a generation, as often as it is to be run."""

    def __init__(self, generation: Generation, spec: ModelSpec) -> None:
        """A model for which there is no such request is warmed up by a forward pass alone."""
        self._generation = generation
        self._threads = spec.threads
        sample = _SAMPLES[spec.generation]
        self._sample = importlib.import_module(f"ndif.runtime.generations.{sample}").sample
        self._payload: bytes | None = None
        self._possible = True

    def as_a_runner(self, policy: Policy | None) -> None:
        """Run it as one that is forked will: with torch's threads, and under its policy."""
        start_threads(self._threads)
        self.run(policy)

    def run(self, policy: Policy | None = None) -> None:
        """Run it in this process, and leave nothing of it."""
        warm_up(self._generation.model)
        if not self._possible:
            return
        try:
            if self._payload is None:
                self._payload = self._sample(self._generation.model, self._prompt())
            saves = self._generation.run(self._payload, {}, _SILENCE, policy)
            Result(self._generation.export(saves), _ANY_SIZE, _ANY_SIZE).compressed()
        except Exception as error:
            # There are more kinds of models than one sentence is for, and each of them is to be served.
            self._possible = False
            print(f"no request could be rehearsed: {sentence(error)}", file=sys.stderr)
        finally:
            self._generation.forget()

    def _prompt(self) -> str:
        tokenizer = getattr(self._generation.model, "tokenizer", None)
        mask = getattr(tokenizer, "mask_token", None)
        return f"{_PROMPT} {mask}" if mask else _PROMPT
