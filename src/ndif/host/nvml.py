"""The process that queries the NVIDIA driver and answers each line of its input with a line of JSON.

A driver that hangs cannot be interrupted, neither in a thread nor by a signal. So the server queries a
child process, `python -m ndif.host.nvml`, and abandons it if it does not answer (`ndif.host.gpus.Driver`).
Only this file imports pynvml.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

_ABSENT = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
_PCI = Path("/sys/bus/pci/devices")

Answer = dict[str, Any]


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
            answer = {"failed": str(error).rstrip("."), "absent": error.value in _ABSENT}
        print(json.dumps(answer), flush=True)


def gpus() -> Answer:
    """Describe every GPU that this process may open, and the instances of divided ones."""
    found, failed = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            found.append(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as error:  # a lost or forbidden GPU does not hide the others
            failed.append(f"GPU {index}: {error}")
    return {"gpus": found, "failures": failed}


def _gpu(handle: Any) -> Answer:
    pci = pynvml.nvmlDeviceGetPciInfo(handle).busId
    return {
        **_device(handle),
        "pci": pci,
        "minor": _or_none(lambda: pynvml.nvmlDeviceGetMinorNumber(handle)),
        "numa_node": _numa_node(pci),
        "instances": _instances(handle),
    }


def _device(handle: Any) -> Answer:
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return {"uuid": uuid, "name": name, **_memory(handle)}


def _memory(handle: Any) -> Answer:
    with contextlib.suppress(pynvml.NVMLError):
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return {"total": info.total, "reserved": info.reserved, "free": info.free}
    # Drivers before 510 count reserved memory as used.
    info = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    if info is None:
        return {"total": None, "reserved": None, "free": None}
    return {"total": info.total, "reserved": 0, "free": info.free}


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


def _instances(gpu: Any) -> list[Answer] | None:
    handles = _instance_handles(gpu)
    if handles is None:
        return None
    found = []
    for one in handles:
        with contextlib.suppress(pynvml.NVMLError):
            found.append(_device(one))
    return found


def processes() -> Answer:
    """List the memory of each process by the UUID of the GPU or instance."""
    used = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            for device in [gpu, *(_instance_handles(gpu) or ())]:
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
                used[pynvml.nvmlDeviceGetUUID(device)] = {
                    one.pid: one.usedGpuMemory for one in running
                }
    return {"processes": used}


def versions() -> Answer:
    """Return the driver's version, and the newest CUDA that it supports, as 1000 times major and so on."""
    return {
        "driver": _or_none(pynvml.nvmlSystemGetDriverVersion),
        "cuda": _or_none(pynvml.nvmlSystemGetCudaDriverVersion_v2),
    }


def _numa_node(pci: str) -> int | None:
    """Return the NUMA node of a GPU; None if the kernel does not know it."""
    domain, _, rest = pci.partition(":")
    with contextlib.suppress(OSError, ValueError):
        node = int((_PCI / f"{int(domain, 16):04x}:{rest.lower()}" / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except pynvml.NVMLError:
        return None


if __name__ == "__main__":
    main()
