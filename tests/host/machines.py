"""Machines with GPUs, as their drivers described them, and a pretend driver that describes them again.

They are recorded outputs of `nvidia-smi -q`, `-L` and `--query-gpu` of real machines, from public sources.
Each docstring names the source and the facts that it lacks. Sizes in the sources are in MiB.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ndif.host.gpus import Gpu, PhysicalGpu
from tests.services.packages import need

MIB = 1 << 20


def card(
    uuid: str,
    name: str,
    pci: str,
    total: int | None,
    reserved: int = 0,
    *,
    minor: int = 0,
    numa_node: int | None = None,
    instances: Sequence[Gpu] | None = None,
) -> PhysicalGpu:
    """Return a GPU of `total` MiB; all memory but the reserved is free."""
    gpu = instance(uuid, name, total, reserved)
    gpu = replace(gpu, numa_node=numa_node)
    return PhysicalGpu(gpu, pci, minor, None if instances is None else tuple(instances))


def instance(uuid: str, name: str, total: int | None, reserved: int = 0) -> Gpu:
    free = 0 if total is None else (total - reserved) * MIB
    return Gpu(uuid, name, None if total is None else total * MIB, reserved * MIB, free)


H100 = tuple(
    card(uuid, "NVIDIA H100 80GB HBM3", f"00000000:{bus}:00.0", 81559, 454, minor=minor)
    for minor, (bus, uuid) in enumerate(
        [
            ("18", "GPU-b42dd28e-ffdd-8720-1df0-98bd8cdc05b1"),
            ("2A", "GPU-7c3cadbd-17e5-0913-f69b-c618122ea0cd"),
            ("3A", "GPU-2d50cdf6-dd67-9f2e-855e-0d4d6d395a2f"),
            ("5D", "GPU-d1838e76-90e6-4408-711d-aeeaa2e1fd14"),
            ("9A", "GPU-72be6e5d-3c1b-0d37-98ac-d3ef159f2589"),
            ("AB", "GPU-52378fbc-3124-3895-13b6-1dd179563e0f"),
            ("BA", "GPU-83a5aebb-b71c-c570-aa83-185e1233fe97"),
            ("DB", "GPU-33135771-a848-ece1-b61e-489e221d663c"),
        ]
    )
)
"""Eight H100 SXM, driver 565.57.01 (`nvidia-smi -q`; github.com/thamada/nvidia-smi)."""

A100_MIG = tuple(
    card(
        uuid,
        "NVIDIA A100-SXM4-80GB",
        f"00000000:{bus}:00.0",
        81920,
        minor=minor,
        instances=[
            instance(f"MIG-{number}", f"NVIDIA A100-SXM4-80GB MIG {profile}", size)
            for number, (profile, size) in zip(
                ones,
                [("3g.40gb", 40192), ("2g.20gb", 19968), ("1g.10gb", 9728), ("1g.10gb", 9728)],
                strict=True,
            )
        ],
    )
    for minor, (bus, uuid, ones) in enumerate(
        [
            (
                "07",
                "GPU-8e100991-ce97-6694-b8eb-b8b1ff5053af",
                [
                    "dcf43e8e-5d19-5fa8-8b1d-8aaca1e467f0",
                    "6b84cf06-0978-530f-bea3-dd6108f98ebf",
                    "3fff3a97-95a9-5046-9053-4c0da3d1add7",
                    "7a99e994-6607-5d8a-9ab3-ace43cf9bd96",
                ],
            ),
            (
                "0F",
                "GPU-938c4705-98bf-1735-e98b-c2a5872a8022",
                [
                    "51872ee5-5410-564e-abd2-27382756d2d4",
                    "9af7553b-306e-55b4-a8c7-4cdef4066af4",
                    "3407f5e5-83f9-55c0-abe5-0e2259ac50b1",
                    "91e26891-6f5b-5ff3-9c66-310e47d6b059",
                ],
            ),
        ]
    )
)
"""The first two of a DGX A100, all-balanced (`nvidia-smi -L`, in an issue of github.com/NVIDIA/deepops).

Not recorded there: bus ids (a DGX A100's first two) and sizes (of the same profiles elsewhere).
"""

A100_40_MIG = (
    card(
        "GPU-27b94a00-ed54-5c24-b1fd-1054085de32a",
        "NVIDIA A100-SXM4-40GB",
        "00000000:00:04.0",
        40960,
        605,
        instances=[
            instance("MIG-GPU-27b94a00-ed54-5c24-b1fd-1054085de32a/1/0", "MIG 3g.20gb", 19968),
            instance("MIG-GPU-27b94a00-ed54-5c24-b1fd-1054085de32a/2/0", "MIG 3g.20gb", 19968),
        ],
    ),
)
"""One A100 in two instances (`nvidia-smi -q -x`, driver 510.47; github.com/netdata/netdata).

Not recorded there: the instances' names, here in the form that drivers before 470 had.
"""

MIXED = tuple(
    card(uuid, name, f"00000000:{bus}:00.0", total, minor=minor)
    for minor, (bus, name, total, uuid) in enumerate(
        [
            ("01", "GeForce GTX 1060 6GB", 6078, "GPU-f3da2e71-6e43-729a-e3ae-f731ed96d50c"),
            ("02", "GeForce GTX 1080 Ti", 11178, "GPU-15ea7bf9-1a0e-2d7f-9c62-c28e5ca1aaf1"),
            ("03", "GeForce GTX 1060 6GB", 6078, "GPU-3dc4f2b0-6e1b-c088-c342-4367c334795a"),
            ("09", "GeForce GTX 1060 6GB", 6078, "GPU-03ddeff3-19c4-6676-d02d-6942bd80630d"),
            ("0A", "GeForce GTX 1060 6GB", 6078, "GPU-ff3318a7-f0dd-dc57-1fb8-cc95ba35c56e"),
        ]
    )
)
"""A faster GPU among four (`--query-gpu=name,pci.bus,index,uuid`; github.com/YoRyan/nuxhash/pull/10).

CUDA's own order puts the 1080 Ti first. Not recorded there: sizes (of the same cards elsewhere).
"""

GB10 = (card("GPU-2dee1e25-b3b5-007e-2b55-79f2d0f2ebe5", "NVIDIA GB10", "0000000F:01:00.0", None),)
"""A DGX Spark, whose memory NVML does not support (github.com/leptonai/gpud/pull/1170)."""

MACHINES = {
    "h100": H100,
    "a100-mig": A100_MIG,
    "a100-40-mig": A100_40_MIG,
    "mixed": MIXED,
    "gb10": GB10,
}


def pretend_driver(folder: Path) -> Path:
    """Compile a libnvidia-ml.so.1 into a folder for LD_LIBRARY_PATH."""
    compiler = need("gcc", "gcc", "libc6-dev")
    source = Path(__file__).with_name("pretend_nvml.c")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", str(source)]
    subprocess.run([*command, "-o", str(folder / "libnvidia-ml.so.1")], check=True)
    return folder


class Machine:
    """The machine that the pretend driver describes."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def becomes(self, cards: Sequence[PhysicalGpu], *more: str) -> None:
        """Describe a machine with these cards; `more` are further lines of the driver's file."""
        self.file.write_text(_described(cards, *more))


def _described(cards: Sequence[PhysicalGpu], *more: str) -> str:
    lines = []
    for device in cards:
        mig = -1 if device.gpu.total_bytes is None else int(device.instances is not None)
        lines.append(
            f"card {device.gpu.uuid} {device.pci} {device.minor} "
            f"{_sizes(device.gpu)} {mig} {device.gpu.name}"
        )
        lines += [f"instance {gpu.uuid} {_sizes(gpu)} {gpu.name}" for gpu in device.instances or ()]
    return "\n".join([*lines, *more, ""])


def _sizes(gpu: Gpu) -> str:
    total = -1 if gpu.total_bytes is None else gpu.total_bytes
    return f"{total} {gpu.reserved_bytes} {gpu.free_bytes}"
