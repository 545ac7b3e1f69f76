"""The weight owner: the process that holds a model's weights on GPUs, and the zygote's client for it.

CUDA does not survive a fork. The zygote, which forks runners, never starts CUDA and has the model without
weights. The weight owner is forked before all runners and loads the weights. Each runner starts CUDA
itself and maps them.

When the weights move to CPU memory, their owner ends; a new one moves them back. The reason: CUDA frees
its own memory on a GPU, and exported memory, only when the process ends.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ndif.runtime.frames import FrameChannel
from ndif.runtime.generations import Generation, create_generation
from ndif.runtime.messages import (
    LoadedModel,
    Message,
    Progress,
    Signal,
    Verified,
    VerifyWeights,
)
from ndif.runtime.process.cuda import Cuda
from ndif.runtime.process.warmup_request import start_threads
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import sentence
from ndif.runtime.weights.cached_weights import CachedWeights
from ndif.runtime.weights.checksum import WeightChecksum
from ndif.runtime.weights.loading import read_confined
from ndif.runtime.weights.restoration import Source, from_safetensors, restore
from ndif.runtime.weights.weights import (
    ExportedWeights,
    ModelDevices,
    collect,
    distinct,
    install,
    place,
    report_progress,
)
from ndif.sandbox.confinement.confinement import DriverFiles

_DEVICE_TIMEOUT_S = 10.0
"""Seconds within which a device must do a small task after the process that kept it busy has ended."""

_RESERVED_FRACTION = 0.1
"""Fraction of the machine's memory that must be available for a cache to be kept after its use."""

_OVERHEAD_BYTES = 256 << 20
"""Bytes that torch takes besides a model of any size: cached blocks, workspaces, a checksum's key."""


def owner_shares(max_memory: Mapping[int, int] | None) -> dict[int, int]:
    """Return the bytes that the weight owner may allocate on each device."""
    return {device: size + _OVERHEAD_BYTES for device, size in (max_memory or {}).items()}


def runner_shares(
    max_memory: Mapping[int, int] | None, weights: Mapping[int, int]
) -> dict[int, int]:
    """Return the bytes that a runner may allocate on each device, in addition to the mapped weights."""
    return {
        device: max(0, size - weights.get(device, 0)) + _OVERHEAD_BYTES
        for device, size in (max_memory or {}).items()
    }


@dataclass(frozen=True, slots=True)
class ModelExport:
    """A loaded model's description and handles, for the processes that map its weights."""

    model: LoadedModel
    load_s: float
    placement: ModelDevices
    weights: ExportedWeights
    weight_bytes: Mapping[int, int]
    """Bytes of the weights by device."""
    files: DriverFiles


@dataclass(frozen=True, slots=True)
class Cache:
    """Unchanged weights in CPU memory, and the export of the owner that copied them there."""

    weights: CachedWeights
    fd: int
    export: ModelExport


class WeightOwner:
    """The owner of the weights on devices, which verifies and restores them.

    Runners map the weights by the handles in `ModelExport` and never communicate with the owner.
    """

    def __init__(
        self,
        channel: FrameChannel,
        spec: ModelSpec,
        generation: Generation,
        driver: Cuda,
        cache: Cache | None,
        *,
        keep_cache: bool,
    ) -> None:
        """Load the weights, from the cache if there is one, and send their export to the zygote.

        With `keep_cache`, the cache stays: weights are restored from it, and the next move to CPU memory
        needs no copy.
        """
        self._channel = channel
        self._spec = spec
        self._driver = driver
        self._cache = cache
        model, load_s = self._load(generation, cache)
        if not keep_cache:
            self._drop_cache()
        gc.collect()
        driver.release_memory()
        module = generation.model._module
        weights = ExportedWeights.of(collect(module), driver.export)
        # The export may have moved the tensors to other memory.
        self._tensors = collect(module)
        self._folder = Path(model.folder)
        with driver.private_memory():
            driver.check(_DEVICE_TIMEOUT_S)
            self._checksum = WeightChecksum.of(self._tensors)
        export = self._export(model, load_s, module, weights)
        channel.send(Signal.LOADED, pickle.dumps(export))

    def _load(self, generation: Generation, cache: Cache | None) -> tuple[LoadedModel, float]:
        """Load the weights; return the model and the seconds that reading its files took."""
        driver, spec = self._driver, self._spec
        driver.prepare_owner()
        driver.start("cuda:0", owner_shares(spec.max_memory))
        if cache is None:
            started = time.perf_counter()
            files = driver.files_to_load()
            read_confined(spec, lambda: generation.load(spec), driver=files)
            return generation.describe(spec), time.perf_counter() - started
        module = generation.model._module
        install(module, cache.weights.tensors(cache.fd))
        place(module, spec, driver)
        return replace(cache.export.model, device=str(module.device)), cache.export.load_s

    def _export(
        self, model: LoadedModel, load_s: float, module: torch.nn.Module, weights: ExportedWeights
    ) -> ModelExport:
        driver = self._driver
        weight_bytes: collections.Counter[int] = collections.Counter()
        for tensor in distinct(self._tensors)[0]:
            weight_bytes[tensor.device.index or 0] += tensor.nbytes
        return ModelExport(
            replace(model, device=driver.node_device(model.device)),
            load_s,
            ModelDevices.of(module),
            weights,
            weight_bytes,
            driver.files(self._tensors.values(), weights.handles),
        )

    def serve(self) -> None:
        """Serve the zygote's requests until the weights are in CPU memory."""
        while True:
            order, _, _ = self._channel.receive()
            if isinstance(order, VerifyWeights):
                if not order.keep_cache:
                    self._drop_cache()
                self._channel.send(Verified(self._verify()))
            else:
                self._verify()
                self._move_to_cache()
                return

    def _verify(self) -> int:
        """Restore changed weights and return their number."""
        with self._driver.private_memory():
            self._driver.check(_DEVICE_TIMEOUT_S)
        changed = self._find_changed(self._tensors)
        if changed:
            restore(self._tensors, changed, self._sources(), self._find_changed)
            self._driver.synchronize()
        return len(changed)

    def _find_changed(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        with self._driver.private_memory():
            return self._checksum.find_changed(tensors)

    def _sources(self) -> list[Source]:
        """Return the sources of unchanged weights, fastest first."""
        cached = [] if self._cache is None else [self._read_cache]
        return [*cached, from_safetensors(self._folder), self._reload]

    def _read_cache(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        assert self._cache is not None  # noqa: S101 - used as a source only while a cache exists
        tensors = self._cache.weights.tensors(self._cache.fd)
        return {name: tensors[name] for name in names}

    def _reload(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        report_progress(None)
        generation = create_generation(self._spec.generation)
        spec = replace(self._spec, device="cpu")
        read_confined(spec, lambda: generation.load(spec), driver=self._driver.files_to_load())
        tensors = collect(generation.model._module)
        return {name: tensors[name] for name in names}

    def _move_to_cache(self) -> None:
        """Copy the weights to CPU memory, unless a kept cache already holds them."""
        if self._cache is not None:
            self._channel.send(Signal.CACHED)
            return
        cached = CachedWeights.of(self._tensors)
        fd = cached.fill(self._tensors, self._driver)
        self._channel.send(Signal.CACHED, pickle.dumps(cached), [fd])

    def _drop_cache(self) -> None:
        if self._cache is not None:
            os.close(self._cache.fd)
            self._cache = None


class WeightOwnerClient:
    """The zygote's client for its weight owners; runners, as forks of the zygote, map the weights with it.

    Owns the channel to the present owner and the cache of the weights in CPU memory.
    """

    def __init__(
        self,
        control: FrameChannel,
        spec: ModelSpec,
        generation: Generation,
        driver: Cuda,
        fork: Callable[[Callable[[], None]], int],
    ) -> None:
        """Start an owner that loads the model, in a child that `fork` makes."""
        self._control = control
        self._generation = generation
        self._driver = driver
        self._fork = fork
        self._cache: Cache | None = None
        self.owner: int | None = None
        """Process id of the owner; None between owners."""
        self.exported = self._start_owner(spec)

    @property
    def channel(self) -> socket.socket:
        """Return the socket on which the owner's answers arrive."""
        return self._channel.socket

    def ask_to_verify(self) -> None:
        """Ask the owner to verify its weights and restore changed ones; `answer` returns the result."""
        if not _can_keep_cache():
            self._drop_cache()
        self._channel.send(VerifyWeights(keep_cache=self._cache is not None))

    def answer(self) -> tuple[Message, bytes]:
        """Return the message and body of the owner's next answer."""
        message, body, _ = self._channel.receive()
        return message, bytes(body)

    def cache(self) -> None:
        """Move the weights to CPU memory and end the owner; all runners must have ended before."""
        self._channel.send(Signal.CACHE)
        message, body, fds = self._channel.receive()
        if message is Signal.FAILED:
            raise RuntimeError(body.decode(errors="replace"))
        if fds:
            self._drop_cache()
            cached = pickle.loads(body)  # noqa: S301 - a fork of this process sent it
            self._cache = Cache(cached, fds[0], self.exported)
        self._reap()
        self._channel.socket.close()

    def uncache(self, max_memory: Mapping[int, int] | None) -> None:
        """Start a new owner that moves the cached weights to devices; a failure cannot be undone."""
        keep = _can_keep_cache()
        spec = replace(self._node_spec, max_memory=max_memory)
        self.exported = self._start_owner(spec, keep_cache=keep)
        if not keep:
            self._drop_cache()
        self._generation.move(self.exported.placement)

    def leave_to_parent(self) -> None:
        """Close the owner's channel in a runner; call this before the descriptor can be reused."""
        self._channel.socket.close()

    def start(self) -> None:
        """Start the driver and map the weights in this process, a runner."""
        shares = runner_shares(self._spec.max_memory, self.exported.weight_bytes)
        self._driver.start(self.exported.placement.device, shares)
        install(self._generation.model._module, self.exported.weights.tensors())

    def _drop_cache(self) -> None:
        if self._cache is not None:
            os.close(self._cache.fd)
            self._cache = None

    def _start_owner(self, spec: ModelSpec, *, keep_cache: bool = False) -> ModelExport:
        """Fork a weight owner, wait until it has loaded, and return its export."""
        self._node_spec, self._spec = spec, self._driver.select(spec)
        connection, owner_end = socket.socketpair()

        def run() -> None:
            connection.close()
            self._run_owner(FrameChannel(owner_end), keep_cache=keep_cache)

        self.owner = self._fork(run)
        owner_end.close()
        # The socket stays open: the owner ends when it is closed.
        self._channel = FrameChannel(connection)
        while True:
            try:
                message, body, _ = self._channel.receive()
            except EOFError as error:
                raise RuntimeError(
                    f"the process that loads the weights ended ({self._reap()})"
                ) from error
            match message:
                case Progress():
                    self._control.send(message)
                case Signal.FAILED:
                    self._control.send(message, bytes(body))
                    sys.exit(1)
                case Signal.LOADED:
                    export: ModelExport = pickle.loads(body)  # noqa: S301 - a fork of this process sent it
                    return export

    def _run_owner(self, channel: FrameChannel, *, keep_cache: bool) -> None:
        """Run the owner until the zygote ends or the weights are cached; report failures to the zygote."""
        start_threads(self._spec.threads)
        report_progress(channel)
        try:
            model = self._spec, self._generation, self._driver, self._cache
            owner = WeightOwner(channel, *model, keep_cache=keep_cache)
            with contextlib.suppress(EOFError, ConnectionError):
                owner.serve()
        except Exception as error:
            traceback.print_exc()
            with contextlib.suppress(OSError):
                channel.send(Signal.FAILED, sentence(error).encode())

    def _reap(self) -> int:
        assert self.owner is not None  # noqa: S101 - an owner was forked
        owner, self.owner = self.owner, None
        return os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1])


def _can_keep_cache() -> bool:
    """Return True if the machine has memory to keep a cache, which saves a later copy."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return available > total * _RESERVED_FRACTION
