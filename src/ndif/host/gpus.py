"""The NVIDIA GPUs of this machine, and the selection that this server may use."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ndif.config.units import format_duration
from ndif.runtime.typed_json import from_json
from ndif.tasks import within

T = TypeVar("T")

_EXIT_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 1 << 24
_NODES = Path("/dev")

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
"""The order of `nvidia-smi`. CUDA's own default puts the fastest GPU first."""


class DriverError(Exception):
    """The driver cannot be queried; the message says why."""

    def __init__(self, why: str, *, absent: bool = False) -> None:
        """Record the reason; `absent` if no driver is installed or loaded."""
        super().__init__(why)
        self.absent = absent


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device: a physical GPU, or an instance of a divided one (MIG)."""

    uuid: str
    name: str
    total_bytes: int | None
    """None where CPU and GPU share one memory (GB10, Jetson), whose size the driver does not report."""
    reserved_bytes: int = 0
    free_bytes: int = 0
    numa_node: int | None = None

    @property
    def usable_bytes(self) -> int | None:
        """Return the bytes that all processes together can allocate."""
        return None if self.total_bytes is None else self.total_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class PhysicalGpu:
    """One physical GPU, whole or divided into instances."""

    gpu: Gpu
    pci: str
    """Domain, bus, device and function, like 00000000:18:00.0."""
    minor: int | None = None
    """The number of its device file, which Slurm uses as its id."""
    instances: tuple[Gpu, ...] | None = None
    """The instances of a GPU in MIG mode, which computes only through them; None for a whole GPU."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The driver's GPUs, and a sentence for each unusable GPU."""

    gpus: tuple[PhysicalGpu, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Used:
    """The bytes of each process on each device, by UUID and process id."""

    processes: Mapping[str, Mapping[int, int | None]]


@dataclass(frozen=True, slots=True)
class DriverVersions:
    """The driver's version, and the newest CUDA that it supports, as 1000 * major + 10 * minor."""

    driver: str | None
    cuda: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """An error of the driver."""

    failed: str
    absent: bool
    """True if no driver is installed or loaded."""


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The devices that a server uses, in torch's order."""

    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for the operator about devices that are not used."""

    @property
    def variable(self) -> str | None:
        """Return `CUDA_VISIBLE_DEVICES` for a process that uses these devices; None if there are none."""
        return ",".join(gpu.uuid for gpu in self.gpus) or None


# The devices that a process may use (pure functions)


def select_visible(gpus: Sequence[PhysicalGpu], variables: Mapping[str, str]) -> VisibleGpus:
    """Select a machine's GPUs by the environment, as CUDA does with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.

    A process that sees an instance of a divided GPU sees no other device, so whole GPUs have precedence.
    Without whole GPUs only one instance is used: the first that the environment names, or else the largest.
    """
    gpus = sorted(gpus, key=lambda gpu: [int(part, 16) for part in re.split("[:.]", gpu.pci)])
    chosen, notes = _named_gpus(gpus, variables)
    whole = [
        device.gpu
        for device in chosen
        if isinstance(device, PhysicalGpu) and device.instances is None
    ]
    instances: list[Gpu] = []
    for device in chosen:
        if isinstance(device, Gpu):
            instances.append(device)
        elif device.instances is not None:
            instances += device.instances
            if not device.instances:
                notes.append(
                    f"{_describe(device.gpu)} is in MIG mode and has no instance: it is not used."
                )
    if not instances:
        return VisibleGpus(tuple(whole), tuple(notes))
    named = [device for device in chosen if isinstance(device, Gpu)]
    used = whole or named[:1] or [max(instances, key=lambda gpu: gpu.total_bytes or 0)]
    unused = len(instances) - (0 if whole else 1)
    if unused:
        notes.append(
            f"{unused} MIG instances are not used: a CUDA process sees one instance, or whole GPUs. "
            f"Start a server for each, with {VISIBLE} set to its UUID (`nvidia-smi -L` lists them)."
        )
    return VisibleGpus(tuple(used), tuple(notes))


def _named_gpus(
    gpus: Sequence[PhysicalGpu], variables: Mapping[str, str]
) -> tuple[list[PhysicalGpu | Gpu], list[str]]:
    """Return the GPUs that the environment names, by default all, and notes for the operator."""
    # Slurm sets GPU_DEVICE_ORDINAL instead if its GPUs are not configured as CUDA devices.
    ordinals = ["GPU_DEVICE_ORDINAL"] if "SLURM_JOB_ID" in variables else []
    for name in (VISIBLE, *ordinals):
        if (text := variables.get(name)) is not None:
            return _parse_list(name, text, gpus)
    return [*_slurm_gpus(gpus, variables)], []


def _slurm_gpus(gpus: Sequence[PhysicalGpu], variables: Mapping[str, str]) -> Sequence[PhysicalGpu]:
    """Return the GPUs of a Slurm job in which `CUDA_VISIBLE_DEVICES` is unset.

    Slurm's global ids are the numbers of the device files, even if the job's cgroup hides some GPUs. Where
    the cgroup hides the other GPUs, the driver shows no more GPUs than there are ids.
    """
    text = variables.get("SLURM_STEP_GPUS") or variables.get("SLURM_JOB_GPUS")
    if text is None or not re.fullmatch(r"\d+(,\d+)*", text):
        return gpus
    ids = {int(number) for number in text.split(",")}
    if len(gpus) <= len(ids):
        return gpus
    return [gpu for gpu in gpus if gpu.minor in ids]


def _parse_list(
    variable: str, text: str, gpus: Sequence[PhysicalGpu]
) -> tuple[list[PhysicalGpu | Gpu], list[str]]:
    """Read a list as CUDA does: an entry without a device ends the list, and a repeated entry voids it."""
    chosen: list[PhysicalGpu | Gpu] = []
    candidates: dict[str, PhysicalGpu | Gpu]
    if text.startswith("MIG-"):
        prefix, candidates = (
            "MIG-",
            {instance.uuid: instance for gpu in gpus for instance in gpu.instances or ()},
        )
    else:
        prefix, candidates = "GPU-", {gpu.gpu.uuid: gpu for gpu in gpus}
    by_uuid = text.startswith(prefix)
    for entry in text.split(","):
        device = (
            _find_by_uuid(entry, prefix, candidates) if by_uuid else _find_by_index(entry, gpus)
        )
        if device is None:
            if entry.strip() in ("", "-1", "NoDevFiles"):  # the usual values for none
                return chosen, []
            return chosen, [
                f"{variable}={text[:200]}: {entry.strip()[:80]!r} names no GPU of this machine; it and "
                "all later entries are left out, as CUDA does."
            ]
        if device in chosen:
            return [], [
                f"{variable}={text[:200]} names a GPU twice: CUDA sees no GPU then, and none is used."
            ]
        chosen.append(device)
    return chosen, []


def _find_by_uuid(
    entry: str, prefix: str, candidates: Mapping[str, PhysicalGpu | Gpu]
) -> PhysicalGpu | Gpu | None:
    if not entry.startswith(prefix):
        return None
    matches = [device for uuid, device in candidates.items() if uuid.startswith(entry)]
    return candidates.get(entry) or (matches[0] if len(matches) == 1 else None)


def _find_by_index(entry: str, gpus: Sequence[PhysicalGpu]) -> PhysicalGpu | None:
    """Return the GPU of this number, which CUDA reads like C's strtol, up to the first other character."""
    number = re.match(r"\s*[+-]?\d+", entry, re.ASCII)
    index = int(number[0]) if number else -1
    return gpus[index] if 0 <= index < len(gpus) else None


def _describe(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.uuid})"


def without_memory(gpu: Gpu) -> str:
    """Return a note for the operator: no model is placed on a device without memory of its own."""
    return (
        f"{_describe(gpu)} shares the machine's memory, and its driver reports no size: no model is placed "
        "on it. Declare the memory for models as a GPU and as a CPU, like NDIF_NODE_GPUS=1x96GiB and "
        "NDIF_NODE_CPU_MEMORY=16GiB."
    )


# The driver


@dataclass(eq=False)
class Driver:
    """Queries the NVIDIA driver through a child process, which the first query starts.

    A child that does not answer in time is killed and abandoned: the driver may block it for ever. Without
    a driver or an answer, each query raises a `DriverError`.
    """

    timeout_s: float = 20.0
    _process: asyncio.subprocess.Process | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def physical_gpus(self) -> tuple[list[PhysicalGpu], list[str]]:
        """Return the GPUs of this machine, and a sentence for each that cannot be used."""
        devices = await self._query("gpus", Devices)
        return [*devices.gpus], [f"{failure}: it is not used." for failure in devices.failures]

    async def processes(self) -> Mapping[str, Mapping[int, int | None]]:
        """Return the bytes of each process on each device, by UUID and process id."""
        return (await self._query("processes", Used)).processes

    async def versions(self) -> tuple[str | None, tuple[int, int] | None]:
        """Return the driver's version, and the newest CUDA that it supports."""
        versions = await self._query("versions", DriverVersions)
        cuda = versions.cuda
        return versions.driver, None if cuda is None else (cuda // 1000, cuda % 1000 // 10)

    async def _query(self, question: str, kind: type[T]) -> T:
        async with self._lock:
            try:
                line = await within(self._read_line(question), self.timeout_s)
            except asyncio.TimeoutError as error:
                self._abandon()
                raise DriverError(
                    f"the NVIDIA driver did not answer within {format_duration(self.timeout_s)}"
                ) from error
            except BaseException:
                self._abandon()
                raise
        with contextlib.suppress(ValueError):
            return from_json(kind, line)
        refused = from_json(Refused, line)
        raise DriverError(f"the NVIDIA driver says {refused.failed}", absent=refused.absent)

    async def _read_line(self, question: str) -> bytes:
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "ndif.host.nvml"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    limit=_MAX_ANSWER_BYTES,
                )
            process = self._process
            assert process.stdin is not None  # noqa: S101 - both are pipes
            assert process.stdout is not None  # noqa: S101
            process.stdin.write(f"{question}\n".encode())
            await process.stdin.drain()
            line = await process.stdout.readline()
        except OSError as error:
            raise DriverError(
                f"the process that queries the NVIDIA driver failed: {error}"
            ) from error
        if not line:
            raise DriverError("the process that queries the NVIDIA driver ended")
        return line

    def _abandon(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """End the child process; the next query starts another."""
        if (process := self._process) is not None:
            self._abandon()
            with contextlib.suppress(asyncio.TimeoutError):  # the driver blocks it
                await within(process.wait(), _EXIT_TIMEOUT_S)


async def find_gpus(driver: Driver, variables: Mapping[str, str]) -> VisibleGpus:
    """Find the devices that a server with these environment variables may use."""
    try:
        gpus, failures = await driver.physical_gpus()
    except DriverError as error:
        return VisibleGpus((), tuple(_explain_missing(error, _NODES)))
    visible = select_visible(gpus, variables)
    return VisibleGpus(visible.gpus, (*failures, *visible.notes))


def _explain_missing(error: DriverError, nodes: Path) -> list[str]:
    """Return a note if GPUs seem to be present and cannot be used."""
    if not error.absent:
        return [f"No GPU is used: {error}."]
    if any(nodes.glob("nvidia[0-9]*")):
        return [
            f"No GPU is used, though there are device files of GPUs: {error} (libnvidia-ml.so.1). A "
            "container needs the driver's utilities: NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        ]
    return []
