"""The process that asks the NVIDIA driver: it answers each line of its input with one of JSON.

A driver that hangs cannot be interrupted, neither in a thread nor by a signal. So the server asks a child
process, `python -m ndif.host.nvml`, and leaves it behind when it does not answer (`ndif.host.gpus.Driver`).
Nothing but this file imports pynvml.
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
    """Answer `cards` and `processes` until the input ends."""
    questions: dict[str, Callable[[], Answer]] = {"cards": cards, "processes": processes}
    for line in sys.stdin:
        try:
            pynvml.nvmlInit()
            answer = questions[line.strip()]()
        except pynvml.NVMLError as error:
            answer = {"failed": str(error).rstrip("."), "absent": error.value in _ABSENT}
        print(json.dumps(answer), flush=True)


def cards() -> Answer:
    """Describe every card that this process may open, and the instances of divided ones."""
    found, failed = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            found.append(_card(pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as error:  # one that is lost, or another's, hides no other
            failed.append(f"GPU {index}: {error}")
    return {"cards": found, "failures": failed}


def _card(handle: Any) -> Answer:
    pci = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    return {
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        "pci": pci,
        "minor": _or_none(lambda: pynvml.nvmlDeviceGetMinorNumber(handle)),
        "numa_node": _numa_node(pci),
        **_memory(handle),
        "instances": _instances(handle),
    }


def _memory(handle: Any) -> Answer:
    """Return the bytes of a device; None where it has no memory of its own to tell of."""
    with contextlib.suppress(pynvml.NVMLError):
        told = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return {"total": told.total, "reserved": told.reserved, "free": told.free}
    # A driver from before 510 counts what it reserves as used.
    told = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    if told is None:
        return {"total": None, "reserved": None, "free": None}
    return {"total": told.total, "reserved": 0, "free": told.free}


def _instances(handle: Any) -> list[Answer] | None:
    """Describe the MIG instances of a card; None where it is not divided."""
    mode = _or_none(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(pynvml.NVMLError):  # there are fewer than there can be
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            found.append(
                {
                    "uuid": _text(pynvml.nvmlDeviceGetUUID(instance)),
                    "name": _text(pynvml.nvmlDeviceGetName(instance)),
                    **_memory(instance),
                }
            )
    return found


def processes() -> Answer:
    """List the bytes that each process holds, by the UUID of the card or instance."""
    used = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError):
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            for device in [card, *_instance_handles(card)]:
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
                used[_text(pynvml.nvmlDeviceGetUUID(device))] = {
                    one.pid: one.usedGpuMemory for one in running
                }
    return {"processes": used}


def _instance_handles(card: Any) -> list[Any]:
    if _instances(card) is None:
        return []
    handles = (
        _or_none(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index))  # noqa: B023 - called at once
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card))
    )
    return [handle for handle in handles if handle is not None]


def _numa_node(pci: str) -> int | None:
    """Return the NUMA node that a card is attached to; None where the kernel does not know."""
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


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
