"""The environment variables of model processes, and the memory and CPUs that this machine gives them."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path

from ndif.config.settings import Settings
from ndif.host.gpus import BY_BUS, ORDER, VISIBLE
from ndif.host.runtimes import Runtime

_CREDENTIALS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
_CONTROL_PLANE = (
    str(Settings.model_config["env_prefix"]),
    "RAY_",
    "POSTGRES_",
    "PGPASS",
    "MAILGUN_",
)
"""Prefixes of the control plane's own variables, which hold secrets: no model process gets them."""
_HARMLESS = (
    *("PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHON", "VIRTUAL_ENV"),
    "GLIBC_TUNABLES",
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_MODULES_CACHE", "XDG_CACHE_HOME"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("TORCH", "PYTORCH_", "CUDA", "CUBLAS_", "NVIDIA_", "NCCL_"),
)
"""Prefixes of the variables that a process for untrusted code keeps: paths and tuning, no secrets."""


def environment(runtime: Runtime, devices: str | None = None) -> dict[str, str]:
    """Return this process's environment, with the runtime's folders first on PYTHONPATH.

    With `devices` as its `CUDA_VISIBLE_DEVICES` a process counts the GPUs as placement does.
    """
    path = [*map(str, runtime.path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # By default torch's threads spin for some 15 ms after their last work, while the host needs the
        # cores to send the result. With this value they spin for up to 3 ms, depending on the processor.
        # The spin must outlast the pauses within a forward pass: a thread that sleeps in each pause costs
        # 12 ms per pass, since Linux in a virtual machine often wakes it on the busy core though another is
        # idle.
        "GOMP_SPINCOUNT": "50000",
        **{
            name: value for name, value in os.environ.items() if not name.startswith(_CONTROL_PLANE)
        },
        # By default CUDA numbers the fastest GPU first; the driver, placement and operators number by bus.
        ORDER: BY_BUS,
        **({} if devices is None else {VISIBLE: devices}),
        "PYTHONPATH": os.pathsep.join(path),
        # The tokenizer's own thread pool would not survive a fork.
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # Files in the server's working folder must not be imported as modules.
        "PYTHONSAFEPATH": "1",
    }


def for_untrusted(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that untrusted code may read; each fork holds it in memory."""
    return {
        **{name: value for name, value in variables.items() if name.startswith(_HARMLESS)},
        "TOKENIZERS_PARALLELISM": "false",
        # The host has fetched the files.
        "HF_HUB_OFFLINE": "1",
        # The hub's library would also read a token from its file.
        "HF_TOKEN_PATH": os.devnull,
    }


def without_credentials(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that reaches the hub without an account."""
    return {
        **{name: value for name, value in variables.items() if name not in _CREDENTIALS},
        "HF_TOKEN_PATH": os.devnull,
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


_KIB = 1024
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_name() -> str:
    """Return the host name of this machine."""
    return platform.node() or "localhost"


def cpu_memory(
    meminfo: Path = Path("/proc/meminfo"), limits: tuple[Path, ...] = _CGROUP_LIMITS
) -> int:
    """Return the bytes of memory of this machine, or of its container if that has less."""
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
        if text.isdigit():  # else "max": no limit
            total = min(total, int(text))
    return total


_NUMA_NODES = Path("/sys/devices/system/node")


def nearby_cpus(
    nodes: Collection[int | None],
    cpus_by_node: Mapping[int, frozenset[int]],
    allowed: frozenset[int],
) -> frozenset[int] | None:
    """Return the allowed CPUs for a process whose GPUs are attached to these NUMA nodes.

    Memory needs no policy of its own: Linux takes a page from the node of the CPU that first touches it.
    None leaves the process on all allowed CPUs: if a GPU's node is unknown, if no CPU near it is allowed,
    or if all allowed CPUs are near.
    """
    if not nodes or None in nodes:
        return None
    nearby = [cpus_by_node.get(node, frozenset()) & allowed for node in nodes if node is not None]
    chosen = frozenset().union(*nearby)
    return chosen if all(nearby) and chosen != allowed else None


def cpus_by_node(folder: Path = _NUMA_NODES) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node; empty if the kernel does not list them."""
    cpus = {}
    for node in folder.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            cpus[int(node.name.removeprefix("node"))] = parse_cpu_list(
                (node / "cpulist").read_text()
            )
    return cpus


def parse_cpu_list(text: str) -> frozenset[int]:
    """Read a list of CPUs as the kernel writes it, like 0-23,48-71, or raise a `ValueError`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(
        cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)
    )


def bind(pid: int, cpus: Collection[int]) -> None:
    """Bind every thread of a process, and the threads that they start later, to these CPUs."""
    # Threads that the main thread starts after its binding inherit the binding.
    others = (int(path.name) for path in Path(f"/proc/{pid}/task").glob("[0-9]*"))
    for thread in [pid, *others]:
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(thread, cpus)
