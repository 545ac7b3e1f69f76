"""The owner: the process that holds a model's weights on GPUs.

CUDA does not survive a fork. So a zygote, which is there to be forked, never starts it and has the model
without weights; the owner, forked before all else, loads them; and a runner maps them once it has started
CUDA for itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ndif.runtime import progress
from ndif.runtime.cached import Cached
from ndif.runtime.driver import Driver, bytes_by_device
from ndif.runtime.frames import Channel
from ndif.runtime.generations import Generation, adapter
from ndif.runtime.memory import owner_shares
from ndif.runtime.placing import place
from ndif.runtime.restoration import Source, from_safetensors, restore
from ndif.runtime.seal import Seal
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import sentence
from ndif.runtime.weights import Exported, Placement, collect, install
from ndif.runtime.zygote import describe
from ndif.sandbox.confinement import DriverFiles

_DEVICE_ANSWERS_S = 10.0
"""Seconds within which a device must do a little work, once whoever kept it busy is gone."""

Load = Callable[[], tuple[dict[str, Any], float]]
"""Loads the model; returns its description, and the seconds that it took."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Description of a loaded model, for those that map its weights."""

    model: dict[str, Any]
    load_s: float
    placement: Placement
    weights: Exported
    weight_bytes: Mapping[int, int]
    """Bytes of the weights by device."""
    files: DriverFiles


def own(channel: Channel, spec: ModelSpec, generation: Generation, driver: Driver) -> None:
    """Load the model, and keep its weights until the zygote is gone, or wants them in the CPU's memory."""

    def load() -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        generation.load(spec)
        load_s = time.perf_counter() - started
        return describe(generation.model, spec), load_s

    _own(channel, spec, generation, driver, load, None)


def own_again(
    channel: Channel,
    spec: ModelSpec,
    generation: Generation,
    driver: Driver,
    cached: Cached,
    fd: int,
    before: Owned,
    *,
    keep: bool,
) -> None:
    """Load weights onto devices that an owner `before` left in the memory behind `fd`.

    It is another process than that one, because what CUDA itself takes of a GPU it gives back with the
    process alone; and so does memory that was exported.

    Args:
        keep: Keep the memory, to restore weights from and to spare the next copy to it.
    """

    def load() -> tuple[dict[str, Any], float]:
        module = generation.model._module
        install(module, cached.tensors(fd))
        if not keep:
            os.close(fd)
        place(module, spec, driver)
        return {**before.model, "device": str(module.device)}, before.load_s

    _own(channel, spec, generation, driver, load, (cached, fd) if keep else None)


def _own(
    channel: Channel,
    spec: ModelSpec,
    generation: Generation,
    driver: Driver,
    load: Load,
    memory: tuple[Cached, int] | None,
) -> None:
    """Start an owner, and serve the zygote until it wants no more; a failure is told and is the end."""
    torch.set_num_threads(spec.threads or len(os.sched_getaffinity(0)))
    progress.report(
        lambda done, total: channel.send({"kind": "progress", "done": done, "total": total})
    )
    try:
        owner = Owner(channel, spec, generation, driver, load, memory)
        with contextlib.suppress(EOFError, ConnectionError):
            owner.serve()
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send({"kind": "failed"}, sentence(error).encode())


class Owner:
    """Weights on devices, and what it takes to see that they are as they were loaded.

    It answers the zygote's questions one after the other. Runners map the weights by the handles in
    `Owned`, and never speak to it.
    """

    def __init__(
        self,
        channel: Channel,
        spec: ModelSpec,
        generation: Generation,
        driver: Driver,
        load: Load,
        memory: tuple[Cached, int] | None,
    ) -> None:
        """Load the weights, share them and tell the zygote.

        Args:
            memory: The memory that they come from, where `load` has them from there.
        """
        self._channel = channel
        self._spec = spec
        self._driver = driver
        self._memory = memory
        driver.prepare_owner()
        driver.start("cuda:0", owner_shares(spec.max_memory))
        model, load_s = load()
        gc.collect()
        driver.release_memory()
        module = generation.model._module
        weights = Exported.of(collect(module), driver.export)
        # Exported memory may be other memory than was collected before.
        self._held = collect(module)
        self._folder = Path(model["folder"])
        self._seal: Seal | None = None
        with driver.private_memory():
            driver.check(_DEVICE_ANSWERS_S)
            if spec.untrusted is not None:
                self._seal = Seal.of(self._held)
        owned = Owned(
            {**model, "device": driver.node_device(model["device"])},
            load_s,
            Placement.of(module),
            weights,
            bytes_by_device(self._held),
            driver.files(self._held.values(), weights.handles),
        )
        channel.send({"kind": "owned"}, pickle.dumps(owned))

    def serve(self) -> None:
        """Answer the zygote until the weights are in the CPU's memory.

        Raises:
            DeviceError: if a device does not answer.
            WeightsError: if changed weights cannot be restored.
            EOFError: if the zygote is gone.
        """
        while True:
            header, _, _ = self._channel.receive()
            match header["kind"]:
                case "verify":
                    if not header["keep_memory"]:
                        self._forget_memory()
                    self._channel.send({"kind": "verified", "restored": self._verify()})
                case "cache":
                    self._verify()
                    self._cache()
                    return

    def _verify(self) -> int:
        """See that the weights are as they were, and make them so; return how many were not."""
        with self._driver.private_memory():
            self._driver.check(_DEVICE_ANSWERS_S)
        changed = self._broken(self._held)
        if changed:
            restore(self._held, changed, self._sources(), self._broken)
            self._driver.synchronize()
        return len(changed)

    def _broken(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of those of `tensors` that are not as they were."""
        if self._seal is None:
            return []
        with self._driver.private_memory():
            return self._seal.broken(tensors)

    def _sources(self) -> list[Source]:
        """Return where unchanged weights are found, the quickest first."""
        sources = [from_safetensors(self._folder), self._load_again]
        if self._memory is None:
            return sources
        cached, fd = self._memory

        def from_memory(names: Sequence[str]) -> dict[str, torch.Tensor]:
            tensors = cached.tensors(fd)
            return {name: tensors[name] for name in names}

        return [from_memory, *sources]

    def _load_again(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        progress.report(lambda *_: None)
        again = adapter(self._spec.generation)
        again.load(replace(self._spec, device="cpu"))
        tensors = collect(again.model._module)
        return {name: tensors[name] for name in names}

    def _cache(self) -> None:
        """Put the weights into the CPU's memory, unless they are there since they came from it."""
        if self._memory is not None and self._seal is not None:
            self._channel.send({"kind": "cached"})
            return
        cached = Cached.of(self._held)
        fd = cached.fill(self._held, self._driver)
        self._channel.send({"kind": "cached"}, pickle.dumps(cached), [fd])

    def _forget_memory(self) -> None:
        if self._memory is not None:
            os.close(self._memory[1])
            self._memory = None
