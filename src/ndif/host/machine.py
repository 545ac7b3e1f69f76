"""This machine: its memory and its GPUs, as far as models may take them."""

from __future__ import annotations

import asyncio
import platform
import shutil
from pathlib import Path

from ndif.tasks import within

_MIB = 1024**2
_KIB = 1024
_PATIENCE_S = 20.0
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def name() -> str:
    """What it is called."""
    return platform.node() or "localhost"


def cpu_memory(
    meminfo: Path = Path("/proc/meminfo"), limits: tuple[Path, ...] = _CGROUP_LIMITS
) -> int:
    """Bytes of memory that this process and its children may have: the machine's, or its container's."""
    total = next(
        int(line.split()[1]) * _KIB
        for line in meminfo.read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    for limit in limits:
        try:
            text = limit.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # else "max": there is none
            total = min(total, int(text))
    return total


async def gpus() -> tuple[int, ...]:
    """Bytes of each NVIDIA GPU, by its index; none where the driver or its tool is missing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    process = await asyncio.create_subprocess_exec(
        tool,
        "--query-gpu=memory.total",
        "--format=csv,noheader,nounits",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        said, _ = await within(process.communicate(), _PATIENCE_S)
    except asyncio.TimeoutError:
        process.kill()  # a driver that hangs has no GPU to offer
        return ()
    return tuple(int(line) * _MIB for line in said.decode().split() if line.isdigit())
