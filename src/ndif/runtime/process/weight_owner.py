"""The weight owner: the process that holds a model's weights on GPUs.

CUDA does not survive a fork. The zygote, which is forked for each runner, never starts CUDA and has the
model without weights. The weight owner, forked before all runners, loads the weights. Each runner starts
CUDA for itself and maps them.
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

from ndif.runtime.frames import Channel
from ndif.runtime.generations import Generation, create_generation
from ndif.runtime.process.driver import Driver, bytes_by_device, owner_shares
from ndif.runtime.process.loaded_model import describe
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import sentence
from ndif.runtime.weights.cached_weights import CachedWeights
from ndif.runtime.weights.checksum import WeightChecksum
from ndif.runtime.weights.restoration import Source, from_safetensors, restore
from ndif.runtime.weights.weights import (
    ExportedWeights,
    Placement,
    collect,
    install,
    place,
    report_progress,
)
from ndif.sandbox.confinement.confinement import DriverFiles

_DEVICE_TIMEOUT_S = 10.0
"""Seconds within which a device must do a little work once the process that kept it busy is gone."""

Load = Callable[[], tuple[dict[str, Any], float]]
"""Loads the model and returns its description and the seconds that loading took."""


@dataclass(frozen=True, slots=True)
class ModelExport:
    """A loaded model's description and handles, for the processes that map its weights."""

    model: dict[str, Any]
    load_s: float
    placement: Placement
    weights: ExportedWeights
    weight_bytes: Mapping[int, int]
    """Bytes of the weights by device."""
    files: DriverFiles


def own(channel: Channel, spec: ModelSpec, generation: Generation, driver: Driver) -> None:
    """Load the model and keep its weights until the zygote ends or moves them to the CPU's memory."""

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
    cached: CachedWeights,
    fd: int,
    before: ModelExport,
    *,
    keep: bool,
) -> None:
    """Load cached weights from the memory behind `fd` onto devices, and keep them as `own` does.

    This is another process than the owner that filled the cache: CUDA returns its own memory on a GPU,
    and exported memory, only when the process ends.

    `before` is the export of the owner that filled the cache. `keep` keeps the cache, to restore weights
    from and to save the next copy to it.
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
    cached: tuple[CachedWeights, int] | None,
) -> None:
    """Start an owner and serve the zygote; report a failure to the zygote and return."""
    torch.set_num_threads(spec.threads or len(os.sched_getaffinity(0)))
    report_progress(
        lambda done, total: channel.send({"kind": "progress", "done": done, "total": total})
    )
    try:
        owner = WeightOwner(channel, spec, generation, driver, load, cached)
        with contextlib.suppress(EOFError, ConnectionError):
            owner.serve()
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send({"kind": "failed"}, sentence(error).encode())


class WeightOwner:
    """Hold weights on devices, verify that they are unchanged, and restore them.

    Serves the zygote's requests one at a time. Runners map the weights by the handles in `ModelExport` and
    never communicate with the owner.
    """

    def __init__(
        self,
        channel: Channel,
        spec: ModelSpec,
        generation: Generation,
        driver: Driver,
        load: Load,
        cached: tuple[CachedWeights, int] | None,
    ) -> None:
        """Load the weights, export them and send the export to the zygote.

        `cached` is the cache that `load` takes the weights from, and its descriptor.
        """
        self._channel = channel
        self._spec = spec
        self._driver = driver
        self._cached = cached
        driver.prepare_owner()
        driver.start("cuda:0", owner_shares(spec.max_memory))
        model, load_s = load()
        gc.collect()
        driver.release_memory()
        module = generation.model._module
        weights = ExportedWeights.of(collect(module), driver.export)
        # The export may have moved the tensors to other memory.
        self._tensors = collect(module)
        self._folder = Path(model["folder"])
        self._checksum: WeightChecksum | None = None
        with driver.private_memory():
            driver.check(_DEVICE_TIMEOUT_S)
            if spec.untrusted is not None:
                self._checksum = WeightChecksum.of(self._tensors)
        export = ModelExport(
            {**model, "device": driver.node_device(model["device"])},
            load_s,
            Placement.of(module),
            weights,
            bytes_by_device(self._tensors),
            driver.files(self._tensors.values(), weights.handles),
        )
        channel.send({"kind": "loaded"}, pickle.dumps(export))

    def serve(self) -> None:
        """Serve the zygote's requests until the weights are in the CPU's memory.

        Raises:
            DeviceError: if a device does not answer.
            WeightsError: if changed weights cannot be restored.
            EOFError: if the zygote has ended.
        """
        while True:
            header, _, _ = self._channel.receive()
            match header["kind"]:
                case "verify":
                    if not header["keep_cache"]:
                        self._drop_cache()
                    self._channel.send({"kind": "verified", "restored": self._verify()})
                case "cache":
                    self._verify()
                    self._cache()
                    return

    def _verify(self) -> int:
        """Restore weights that have changed and return their number."""
        with self._driver.private_memory():
            self._driver.check(_DEVICE_TIMEOUT_S)
        changed = self._find_changed(self._tensors)
        if changed:
            restore(self._tensors, changed, self._sources(), self._find_changed)
            self._driver.synchronize()
        return len(changed)

    def _find_changed(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the tensors that have changed since they were loaded."""
        if self._checksum is None:
            return []
        with self._driver.private_memory():
            return self._checksum.find_changed(tensors)

    def _sources(self) -> list[Source]:
        """Return the sources of unchanged weights, the quickest first."""
        sources = [from_safetensors(self._folder), self._load_again]
        if self._cached is None:
            return sources
        cached, fd = self._cached

        def from_memory(names: Sequence[str]) -> dict[str, torch.Tensor]:
            tensors = cached.tensors(fd)
            return {name: tensors[name] for name in names}

        return [from_memory, *sources]

    def _load_again(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        report_progress(lambda *_: None)
        again = create_generation(self._spec.generation)
        again.load(replace(self._spec, device="cpu"))
        tensors = collect(again.model._module)
        return {name: tensors[name] for name in names}

    def _cache(self) -> None:
        """Copy the weights to the CPU's memory, unless the cache that they came from still holds them."""
        if self._cached is not None and self._checksum is not None:
            self._channel.send({"kind": "cached"})
            return
        cached = CachedWeights.of(self._tensors)
        fd = cached.fill(self._tensors, self._driver)
        self._channel.send({"kind": "cached"}, pickle.dumps(cached), [fd])

    def _drop_cache(self) -> None:
        if self._cached is not None:
            os.close(self._cached[1])
            self._cached = None
