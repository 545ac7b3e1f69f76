"""The driver of NVIDIA GPUs, through torch. No other module of the model plane calls `torch.cuda`.

The tests replace `Cuda` by a stand-in that needs no GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from ndif.runtime.process.children import fork
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import UserFacingError
from ndif.sandbox.confinement.confinement import DriverFiles, interpreter_paths

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A function and its arguments, which rebuild a tensor in another process."""

_MAX_DEVICES = 255
_POLL_S = 0.001
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator, in order of precedence."""
_NODES = "/dev/nvidia"
_GPU_NODE = re.compile(rf"{_NODES}(\d+)")
_UVM_TOOLS = "/dev/nvidia-uvm-tools"
"""A device file that drivers from version 570 on open and close again when they start."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_COUNTER = b"/torch_"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where torch keeps its counters, by name


class DeviceError(UserFacingError):
    """A GPU does not respond, or its state in this process is lost: "CUDA error on GPU 2: …"."""


class Cuda:
    """The devices of a model process; the weight owner and runners start them, the zygote never does."""

    def __init__(self) -> None:
        self._visible = os.environ.get(_VISIBLE)
        self._selected: list[int] | None = None
        """Indices of the selected devices among the devices visible when this process started."""
        self._pools: list[Any] = []
        self._check_tensors: dict[int, torch.Tensor] = {}
        """A small tensor on each device, so that later checks allocate no memory."""

    def uses_devices(self, spec: ModelSpec) -> bool:
        """Return True if the weights belong on devices, and restrict this process to these.

        Otherwise hide all devices from this process.

        Raises:
            ValueError: If a device is missing.
        """
        named = spec.device is not None and spec.device.startswith("cuda")
        anywhere = spec.device in (None, "auto")
        count = _count_devices() if named or anywhere else 0
        if count == 0 and (named or (anywhere and spec.max_memory)):
            where = spec.device if named else f"GPU {min(spec.max_memory or ())}"
            raise ValueError(
                f"The model is to be on {where}, but torch {torch.__version__} finds no CUDA device here"
            )
        if count == 0:
            # A transformers pipeline moves a model to the first visible GPU, whatever its device argument.
            os.environ[_VISIBLE] = ""
            return False
        chosen = chosen_devices(spec)
        if chosen and max(chosen) >= count:
            raise ValueError(
                f"The model is to be on GPU {max(chosen)}, but torch finds {count} CUDA devices here, "
                "counted from 0"
            )
        self._restrict_to(chosen or [*range(count)])
        return True

    def select(self, spec: ModelSpec) -> ModelSpec:
        """Restrict this process to the devices of `spec`; return `spec` with devices renumbered from 0."""
        chosen = chosen_devices(spec) or self._selected or []
        self._restrict_to(chosen)
        given = spec.max_memory or {}
        memory = {number: given[index] for number, index in enumerate(chosen) if index in given}
        named = spec.device is not None and spec.device.startswith("cuda")
        return replace(spec, device="cuda:0" if named else "auto", max_memory=memory or None)

    def _restrict_to(self, chosen: list[int]) -> None:
        self._selected = chosen
        os.environ[_VISIBLE] = visible_devices(self._visible, chosen)
        # With a cached count, torch does not start CUDA to count devices.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        torch.cuda._cached_device_count = len(chosen)

    def node_device(self, device: str) -> str:
        """Return the node's name of a selected device: the inverse of the renumbering by `select`."""
        kind, _, index = device.partition(":")
        if kind != "cuda" or not self._selected:
            return device
        return f"cuda:{self._selected[int(index or 0)]}"

    def find_early_start(self) -> str | None:
        """Return an error sentence if CUDA was already started in this process, else None."""
        if not torch.cuda.is_initialized() and not _open_nodes():
            return None
        packages = sorted(_packages_of_cuda())
        cause = f" (imported packages that may do so: {', '.join(packages)})" if packages else ""
        return f"CUDA was started in the process that forks runners, and does not survive a fork{cause}"

    def prepare_owner(self) -> None:
        """Turn off expandable segments: other processes could map these only with ptrace rights."""
        settings = allocator_settings(os.environ)
        if settings is not None:
            _set_allocator(settings)

    def start(self, device: str, shares: Mapping[int, int]) -> None:
        """Start CUDA, make `device` the default, and limit allocations to `shares`, bytes by device."""
        torch.cuda.init()
        torch.cuda.set_device(device)
        for index, size in shares.items():
            total = torch.cuda.get_device_properties(index).total_memory
            if size < total:
                torch.cuda.set_per_process_memory_fraction(size / total, index)

    def export(self, tensors: Iterable[torch.Tensor]) -> list[Handle]:
        """Share tensors with other processes; return their handles when the contents are complete.

        Each tensor is exported once, and all runners share its handle: every export adds a wrapper that
        torch frees only with the memory. The reference counter in a handle is never used to free memory
        here, so a killed runner leaks no memory.
        """
        self.synchronize()
        return [without_event(reduce_tensor(tensor)) for tensor in tensors]

    def files(self, tensors: Iterable[torch.Tensor], handles: Iterable[Handle]) -> DriverFiles:
        """Return the files that a process must open to map these tensors and compute with them."""
        return self._files({_UVM_TOOLS, *_open_nodes()}, _counters(handles))

    def files_to_load(self) -> DriverFiles:
        """Return the files that this process must open to load weights onto any of its devices."""
        # The first context on a device opens its device file again.
        nodes = {str(node) for node in Path(_NODES).parent.glob("nvidia[0-9]*")}
        return self._files({_UVM_TOOLS, *_open_nodes(), *nodes}, ())

    def _files(self, devices: Iterable[str], shared_memory: Iterable[str]) -> DriverFiles:
        # A runner sees all devices that this process sees, including devices without weights.
        identities = [_identity(index) for index in range(torch.cuda.device_count())]
        minors = gpu_minors(_information(), identities)
        return DriverFiles(
            libraries=tuple(map(str, interpreter_paths())),
            devices=tuple(sorted(node for node in devices if _is_selected(node, minors))),
            shared_memory=tuple(sorted(shared_memory)),
        )

    @contextlib.contextmanager
    def private_memory(self) -> Iterator[None]:
        """Allocate from a separate pool while the context lasts: CUDA exports whole blocks of memory."""
        if not self._pools:
            for index in range(torch.cuda.device_count()):
                with torch.cuda.device(index):
                    self._pools.append(torch.cuda.MemPool())
        with contextlib.ExitStack() as stack:
            for index, pool in enumerate(self._pools):
                stack.enter_context(torch.cuda.use_mem_pool(pool, index))
            yield

    def check(self, deadline_s: float) -> None:
        """Run a small task on every device in use; raise DeviceError if one fails or is too slow."""
        deadline = time.monotonic() + deadline_s
        for index in _devices_in_use():
            with self._device_errors(index):
                with torch.cuda.device(index):
                    if index not in self._check_tensors:
                        self._check_tensors[index] = torch.ones(1, device="cuda")
                    event = torch.cuda.Event()
                    self._check_tensors[index].fill_(1)
                    event.record()
                while not event.query():
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"CUDA error: it did nothing for {deadline_s:g}s")
                    time.sleep(_POLL_S)

    def synchronize(self) -> None:
        """Wait for all work of this process; raise DeviceError if a device has lost its state."""
        for index in _devices_in_use():
            with self._device_errors(index):
                torch.cuda.synchronize(index)

    @contextlib.contextmanager
    def _device_errors(self, index: int) -> Iterator[None]:
        """Translate torch's errors into a one-line DeviceError with the node's device number."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0].removeprefix("CUDA error: ")
            number = self.node_device(f"cuda:{index}").removeprefix("cuda:")
            raise DeviceError(f"CUDA error on GPU {number}: {reason}") from error

    def pinned(self, size: int) -> torch.Tensor:
        """Return a pinned buffer of `size` bytes, which devices copy to and from directly."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self, device: torch.device) -> torch.cuda.Event:
        """Return an event at the end of the work that is queued on a device."""
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
        return event

    def release_memory(self) -> None:
        """Return memory that the allocator caches to the device."""
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Reset the peak of allocated memory."""
        for index in _devices_in_use():
            torch.cuda.reset_peak_memory_stats(index)

    def peak_bytes(self) -> int:
        """Return the peak of allocated memory on any one device since `reset_peak`."""
        return max(map(torch.cuda.max_memory_allocated, _devices_in_use()), default=0)


def is_available() -> bool:
    """Return True if CUDA works; the call starts CUDA in this process."""
    return torch.cuda.is_available()


def chosen_devices(spec: ModelSpec) -> list[int]:
    """Return the indices of the devices that `spec` names; [] if it leaves the choice to torch."""
    if spec.device is not None and spec.device.startswith("cuda"):
        return [int(spec.device.partition(":")[2] or 0)]
    return sorted(spec.max_memory or ())


def visible_devices(visible: str | None, chosen: Iterable[int]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that shows only `chosen` of the `visible` devices."""
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    return ",".join(str(index) if names is None else names[index] for index in chosen)


def allocator_settings(environment: Mapping[str, str]) -> str | None:
    """Return torch's allocator settings with expandable segments off; None if they are not on."""
    settings = next((environment[name] for name in _ALLOCATOR if environment.get(name)), "")
    without = re.sub(r"(expandable_segments\s*:\s*)(True|true|1)", r"\1False", settings)
    return None if without == settings else without


def without_event(handle: Handle) -> Handle:
    """Return a handle that opens without the event that torch puts into the first 1,000 handles."""
    # Opening an event needs driver files in /dev/shm that another process created.
    function, arguments = handle
    bound = inspect.signature(function).bind(*arguments)
    if "event_sync_required" in bound.arguments:
        bound.arguments["event_sync_required"] = False
    return function, bound.args


def gpu_minors(
    information: Mapping[str, str], identities: Iterable[tuple[str, str]]
) -> frozenset[int] | None:
    """Return the device file numbers of GPUs; None if one of them is unknown.

    `information` is the driver's text about each GPU (/proc/driver/nvidia/gpus) by PCI address.
    `identities` are the PCI address and UUID of each GPU, "" if unknown.
    """
    minors = set()
    for address, uuid in identities:
        text = information.get(address) or next(
            (text for text in information.values() if uuid and uuid in text), ""
        )
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        if minor is None:
            return None
        minors.add(int(minor[1]))
    return frozenset(minors)


def _is_selected(node: str, minors: frozenset[int] | None) -> bool:
    gpu = _GPU_NODE.fullmatch(node)
    return gpu is None or minors is None or int(gpu[1]) in minors


def _information() -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in _GPUS.glob("*/information")}


def _identity(index: int) -> tuple[str, str]:
    """Return the PCI address and UUID of a device; "" for a property that this torch lacks."""
    properties = torch.cuda.get_device_properties(index)
    parts = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    address = "{:04x}:{:02x}:{:02x}.0".format(*parts) if min(parts) >= 0 else ""
    return address, str(getattr(properties, "uuid", ""))


def _counters(handles: Iterable[Handle]) -> set[str]:
    """Return the files in which torch counts the processes that use an exported tensor."""
    return {
        str(_SHARED_MEMORY / argument.decode().removeprefix("/"))
        for _, arguments in handles
        for argument in arguments
        if isinstance(argument, bytes) and argument.startswith(_COUNTER)
    }


def _open_nodes() -> set[str]:
    """Return the NVIDIA device files that this process has open."""
    nodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            nodes.add(os.readlink(descriptor))  # noqa: PTH115 - as text
    return {node for node in nodes if node.startswith(_NODES)}


def _packages_of_cuda() -> set[str]:
    """Return the packages, except torch, triton and NVIDIA's, that have loaded a CUDA library."""
    packages = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path("/", line.partition("/")[2])
        parts = path.parts
        if "cuda" in path.name.lower() and "site-packages" in parts[:-1]:
            packages.add(parts[parts.index("site-packages") + 1])
    return packages - {"torch", "nvidia", "triton"}


def _devices_in_use() -> list[int]:
    """Return the indices of the devices on which this process has a context."""
    if not torch.cuda.is_initialized():
        return []
    has_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext")  # noqa: B009
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def _set_allocator(settings: str) -> None:
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is not None:
        set_settings(settings)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(settings)


def _count_devices() -> int:
    """Count CUDA devices in a child process, because torch starts CUDA to count.

    NVML needs no start, but it does not count MIG instances and is missing in some containers.
    """
    if not torch.backends.cuda.is_built():
        return 0

    def count() -> int:
        with contextlib.suppress(Exception):
            if torch.cuda.is_available():
                return min(torch.cuda.device_count(), _MAX_DEVICES)
        return 0

    return max(os.waitstatus_to_exitcode(os.waitpid(fork(count), 0)[1]), 0)
