"""The NVIDIA GPUs of this machine: what the driver tells of them, and which of them this server may use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndif.tasks import within

_PATIENCE_S = 20.0
_LAST_S = 2.0
_LARGEST_ANSWER = 1 << 24
_NODES = Path("/dev")

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
"""The order of `nvidia-smi`. CUDA's own default puts the fastest card first."""


class DriverError(Exception):
    """The driver cannot be asked; the message says why."""

    def __init__(self, why: str, *, absent: bool = False) -> None:
        """`absent`: there is no driver, or none is loaded."""
        super().__init__(why)
        self.absent = absent


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device: a card, or an instance of a divided card (MIG)."""

    uuid: str
    name: str
    total_bytes: int | None
    """None where CPU and GPU share one memory (GB10, Jetson), of which the driver tells no size."""
    reserved_bytes: int = 0
    """Bytes that driver and firmware keep for themselves."""
    free_bytes: int = 0
    numa_node: int | None = None

    @property
    def usable_bytes(self) -> int | None:
        """Bytes that processes can allocate altogether."""
        return None if self.total_bytes is None else self.total_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class Card:
    """One physical card."""

    gpu: Gpu
    pci: str
    """Domain, bus, device and function, like 00000000:18:00.0."""
    minor: int | None = None
    """The number of its device file, by which Slurm counts."""
    instances: tuple[Gpu, ...] | None = None
    """The instances of a card in MIG mode, which serves through nothing else; None where it is whole."""


@dataclass(frozen=True, slots=True)
class Visible:
    """The devices that a server uses, in the order in which torch counts them."""

    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for the operator about the rest."""

    @property
    def variable(self) -> str | None:
        """`CUDA_VISIBLE_DEVICES` for a process that counts these devices; None where there are none."""
        return ",".join(gpu.uuid for gpu in self.gpus) or None


# Which devices a process may use: pure


def visible(cards: Sequence[Card], variables: Mapping[str, str]) -> Visible:
    """Choose among the cards of a machine by the environment, as CUDA does where it counts by bus.

    A process that sees an instance of a divided card sees that instance and nothing else: so whole cards go
    first, and where there are none the largest instance is used alone.
    """
    cards = sorted(cards, key=_bus)
    chosen, notes = _chosen(cards, variables)
    whole = [one.gpu for one in chosen if isinstance(one, Card) and one.instances is None]
    instances: list[Gpu] = []
    for one in chosen:
        if isinstance(one, Gpu):
            instances.append(one)
        elif one.instances is not None:
            instances += one.instances
            if not one.instances:
                notes.append(
                    f"{_called(one.gpu)} is in MIG mode and has no instance: it is not used."
                )
    if not instances:
        return Visible(tuple(whole), tuple(notes))
    used = whole or [_first_named(chosen) or max(instances, key=lambda gpu: gpu.total_bytes or 0)]
    unused = len(instances) - (0 if whole else 1)
    if unused:
        notes.append(
            f"{unused} MIG instances are not used: a CUDA process sees one instance, or whole cards. "
            f"Start a server for each, with {VISIBLE} set to its UUID (`nvidia-smi -L` lists them)."
        )
    return Visible(tuple(used), tuple(notes))


def _first_named(chosen: Sequence[Card | Gpu]) -> Gpu | None:
    """The instance that was named first, where instances were named."""
    return next((one for one in chosen if isinstance(one, Gpu)), None)


def _chosen(
    cards: Sequence[Card], variables: Mapping[str, str]
) -> tuple[list[Card | Gpu], list[str]]:
    """Return the GPUs that the environment names, or all."""
    for name in (VISIBLE, *_ordinals(variables)):
        if (text := variables.get(name)) is not None:
            return _listed(name, text, cards)
    return [*_of_slurm(cards, variables)], []


def _ordinals(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The variable that Slurm sets to the same list where it is told that a card is no CUDA device."""
    return ("GPU_DEVICE_ORDINAL",) if "SLURM_JOB_ID" in variables else ()


def _of_slurm(cards: Sequence[Card], variables: Mapping[str, str]) -> Sequence[Card]:
    """The cards of a Slurm job whose `CUDA_VISIBLE_DEVICES` was taken away.

    Slurm's global ids are the numbers of the device files, whatever the job's cgroup hides. Where the
    cgroup hides the others, the driver shows no more cards than there are ids.
    """
    text = variables.get("SLURM_STEP_GPUS") or variables.get("SLURM_JOB_GPUS")
    if text is None or not re.fullmatch(r"\d+(,\d+)*", text):
        return cards
    ids = {int(one) for one in text.split(",")}
    if len(cards) <= len(ids):
        return cards
    return [card for card in cards if card.minor in ids]


def _listed(variable: str, text: str, cards: Sequence[Card]) -> tuple[list[Card | Gpu], list[str]]:
    """Read a list as CUDA does: an entry that names no device ends it, one that is there twice voids it."""
    chosen: list[Card | Gpu] = []
    if text.startswith("MIG-"):
        prefix, known = "MIG-", _by_uuid(one for card in cards for one in card.instances or ())
    else:
        prefix, known = "GPU-", _by_uuid(cards)
    by_uuid = text.startswith(prefix)
    for entry in text.split(","):
        found = _uuid(entry, prefix, known) if by_uuid else _index(entry, cards)
        if found is None:
            if entry.strip() in ("", "-1", "NoDevFiles"):  # the usual words for none
                return chosen, []
            return chosen, [
                f"{variable}={text[:200]}: {entry.strip()[:80]!r} names no GPU of this machine; it and "
                "what follows it are left out, as CUDA leaves them out."
            ]
        if found in chosen:
            return [], [
                f"{variable}={text[:200]} names a GPU twice: CUDA sees no GPU then, and none is used."
            ]
        chosen.append(found)
    return chosen, []


def _by_uuid(devices: Iterable[Card | Gpu]) -> dict[str, Card | Gpu]:
    return {(one.gpu if isinstance(one, Card) else one).uuid: one for one in devices}


def _uuid(entry: str, prefix: str, known: Mapping[str, Card | Gpu]) -> Card | Gpu | None:
    """The one device whose UUID begins like this."""
    if not entry.startswith(prefix):
        return None
    found = [device for uuid, device in known.items() if uuid.startswith(entry)]
    return known.get(entry) or (found[0] if len(found) == 1 else None)


def _index(entry: str, cards: Sequence[Card]) -> Card | None:
    """The card of this number, which CUDA reads as C's strtol does: up to the first other character."""
    number = re.match(r"\s*[+-]?\d+", entry, re.ASCII)
    index = int(number[0]) if number else -1
    return cards[index] if 0 <= index < len(cards) else None


def _bus(card: Card) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split("[:.]", card.pci))


def _called(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.uuid})"


def without_memory(gpu: Gpu) -> str:
    """Say to the operator why a device has no place in the books."""
    return (
        f"{_called(gpu)} shares the machine's memory, and its driver tells no size: no model is placed on "
        "it. Declare what models may take as a GPU and as a CPU, like NDIF_NODE_GPUS=1x96GiB and "
        "NDIF_NODE_CPU_MEMORY=16GiB."
    )


def cards_of(answer: Mapping[str, Any]) -> list[Card]:
    """Read the answer of `ndif.host.nvml` to `cards`."""
    return [
        Card(
            _gpu(said, said["numa_node"]),
            said["pci"],
            said["minor"],
            None
            if said["instances"] is None
            else tuple(_gpu(one, said["numa_node"]) for one in said["instances"]),
        )
        for said in answer["cards"]
    ]


def _gpu(said: Mapping[str, Any], numa_node: int | None) -> Gpu:
    # Of a device without memory of its own some drivers tell nothing, and others 0.
    total = said["total"] or None
    return Gpu(
        said["uuid"], said["name"], total, said["reserved"] or 0, said["free"] or 0, numa_node
    )


# The driver


class Driver:
    """A child process that asks the NVIDIA driver, started when it is first needed.

    One that does not answer in time is killed and left behind: the driver may keep it for ever.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def cards(self) -> tuple[list[Card], list[str]]:
        """Return the cards of this machine, and a sentence for each that cannot be used.

        Raises:
            DriverError: if there is no driver, or it does not answer.
        """
        answer = await self._ask("cards")
        return cards_of(answer), [f"{failure}: it is not used." for failure in answer["failures"]]

    async def processes(self) -> dict[str, dict[int, int | None]]:
        """Return the bytes of each process on each device, by UUID and process id.

        Raises:
            DriverError: if there is no driver, or it does not answer.
        """
        answer = await self._ask("processes")
        return {
            uuid: {int(pid): size for pid, size in used.items()}
            for uuid, used in answer["processes"].items()
        }

    async def _ask(self, question: str) -> dict[str, Any]:
        async with self._asking:
            try:
                line = await within(self._line(question), self._patience_s)
            except asyncio.TimeoutError as error:
                self._leave()
                raise DriverError(
                    f"the NVIDIA driver did not answer within {self._patience_s:g} s"
                ) from error
            except BaseException:
                self._leave()
                raise
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise DriverError(f"the NVIDIA driver says {answer['failed']}", absent=answer["absent"])
        return answer

    async def _line(self, question: str) -> bytes:
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "ndif.host.nvml"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    limit=_LARGEST_ANSWER,
                )
            process = self._process
            assert process.stdin is not None  # noqa: S101 - both are pipes
            assert process.stdout is not None  # noqa: S101
            process.stdin.write(f"{question}\n".encode())
            await process.stdin.drain()
            line = await process.stdout.readline()
        except OSError as error:
            raise DriverError(f"the process that asks the NVIDIA driver failed: {error}") from error
        if not line:
            raise DriverError("the process that asks the NVIDIA driver ended")
        return line

    def _leave(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """End the child process; the next question starts another."""
        process = self._process
        self._leave()
        if process is not None:
            with contextlib.suppress(asyncio.TimeoutError):  # the driver has it
                await within(process.wait(), _LAST_S)


async def look(driver: Driver, variables: Mapping[str, str]) -> Visible:
    """Find the devices that a server with these environment variables may use."""
    try:
        cards, failures = await driver.cards()
    except DriverError as error:
        return Visible((), tuple(_why_none(error, _NODES)))
    found = visible(cards, variables)
    return Visible(found.gpus, (*failures, *found.notes))


def _why_none(error: DriverError, nodes: Path) -> list[str]:
    """Say why GPUs are not found that seem to be here; nothing where none seem to be."""
    if not error.absent:
        return [f"No GPU is used: {error}."]
    if any(nodes.glob("nvidia[0-9]*")):
        return [
            f"No GPU is counted on, though there are device files of some: {error} (libnvidia-ml.so.1). A "
            "container needs the driver's utilities: NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        ]
    return []
