"""The process that queries the NVIDIA driver and answers each line of its input with a line of JSON.

A driver that hangs cannot be interrupted, neither in a thread nor by a signal. So the server queries a
child process, `python -m ndif.host.nvml`, and abandons it if it does not answer (`ndif.host.gpus.Driver`).
Only this file imports pynvml.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from ndif.host.gpus import Devices, DriverVersions, Gpu, PhysicalGpu, Refused, Used
from ndif.runtime.typed_json import to_json

_ABSENT = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
_PCI = Path("/sys/bus/pci/devices")

Answer = Devices | Used | DriverVersions | Refused


def main() -> None:
    """Answer `gpus`, `processes` and `versions` until the input ends."""
    questions: dict[str, Callable[[], Answer]] = {
        "gpus": gpus,
        "processes": processes,
        "versions": versions,
    }
    for line in sys.stdin:
        try:
            pynvml.nvmlInit()
            answer = questions[line.strip()]()
        except pynvml.NVMLError as error:
            answer = Refused(str(error).rstrip("."), error.value in _ABSENT)
        print(to_json(answer).decode(), flush=True)


def gpus() -> Devices:
    """Describe every GPU that this process may open, and the instances of divided ones."""
    devices, failed = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            devices.append(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as error:  # a lost or forbidden GPU does not hide the others
            failed.append(f"GPU {index}: {error}")
    return Devices(tuple(devices), tuple(failed))


def _gpu(handle: Any) -> PhysicalGpu:
    pci = pynvml.nvmlDeviceGetPciInfo(handle).busId
    node = _numa_node(pci)
    minor = _or_none(lambda: pynvml.nvmlDeviceGetMinorNumber(handle))
    return PhysicalGpu(_device(handle, node), pci, minor, _instances(handle, node))


def _device(handle: Any, numa_node: int | None) -> Gpu:
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    total, reserved, free = _memory(handle)
    # For a device without memory of its own some drivers report nothing and others 0.
    return Gpu(uuid, name, total or None, reserved or 0, free or 0, numa_node)


def _memory(handle: Any) -> tuple[int | None, int | None, int | None]:
    """Return the total, the reserved and the free bytes of a device."""
    with contextlib.suppress(pynvml.NVMLError):
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return info.total, info.reserved, info.free
    # Drivers before 510 count reserved memory as used.
    info = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return (None, None, None) if info is None else (info.total, 0, info.free)


def _instance_handles(gpu: Any) -> list[Any] | None:
    """Return the handles of a GPU's MIG instances; None if it is not divided."""
    mode = _or_none(lambda: pynvml.nvmlDeviceGetMigMode(gpu))
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    handles = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with contextlib.suppress(pynvml.NVMLError):  # fewer instances than the maximum
            handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
    return handles


def _instances(gpu: Any, numa_node: int | None) -> tuple[Gpu, ...] | None:
    handles = _instance_handles(gpu)
    if handles is None:
        return None
    instances = []
    for handle in handles:
        with contextlib.suppress(pynvml.NVMLError):
            instances.append(_device(handle, numa_node))
    return tuple(instances)


def processes() -> Used:
    """List the memory of each process by the UUID of the GPU or instance."""
    used = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            for device in [gpu, *(_instance_handles(gpu) or ())]:
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
                used[pynvml.nvmlDeviceGetUUID(device)] = {
                    process.pid: process.usedGpuMemory for process in running
                }
    return Used(used)


def versions() -> DriverVersions:
    """Return the driver's version, and the newest CUDA that it supports."""
    driver = _or_none(pynvml.nvmlSystemGetDriverVersion)
    return DriverVersions(driver, _or_none(pynvml.nvmlSystemGetCudaDriverVersion_v2))


def _numa_node(pci: str) -> int | None:
    """Return the NUMA node of a GPU; None if the kernel does not know it."""
    domain, _, rest = pci.partition(":")
    with contextlib.suppress(OSError, ValueError):
        node = int((_PCI / f"{int(domain, 16):04x}:{rest.lower()}" / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _or_none(query: Callable[[], Any]) -> Any:
    try:
        return query()
    except pynvml.NVMLError:
        return None


if __name__ == "__main__":
    main()
