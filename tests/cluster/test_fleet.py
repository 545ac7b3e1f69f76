"""This machine as a fleet of one node: detected or declared GPUs, and GPU variables of processes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ndif.cluster.fleet import LocalMachine, ThisMachine, inspect_machine
from ndif.config.settings import Settings
from ndif.host.environment import environment, for_untrusted
from ndif.host.gpus import Driver, Gpu, PhysicalGpu
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtimes
from ndif.server.node_actor import _check_gpus
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore
from tests.host.machines import A100_MIG, GB10, H100, MIB, MIXED, Machine
from tests.on_loop import on_loop

pytestmark = pytest.mark.process


async def inspected(
    machine: Machine, cards: Sequence[PhysicalGpu], node_gpus: str = ""
) -> LocalMachine:
    machine.becomes(cards)
    driver = Driver()
    inspection = await inspect_machine(
        Settings(node_gpus=node_gpus, node_cpu_memory="64GiB"), driver
    )
    await driver.close()
    return inspection


def uuids(cards: Sequence[Gpu]) -> list[str]:
    return [gpu.uuid for gpu in cards]


@on_loop
async def test_node_counts_usable_gpu_memory(machine: Machine) -> None:
    inspection = await inspected(machine, H100)
    resources = inspection.node.resources
    assert resources.gpu_bytes == ((81559 - 454) * MIB,) * 8
    assert list(resources.gpu_uuids) == [card.gpu.uuid for card in H100]
    assert inspection.has_gpus


@on_loop
async def test_node_and_processes_number_gpus_alike(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    inspection = await inspected(machine, MIXED)
    expected = [MIXED[3].gpu.uuid, MIXED[1].gpu.uuid]
    assert list(inspection.node.resources.gpu_uuids) == expected
    (runtime, *_) = Runtimes(Path("/nowhere")).installed().values()
    variables = environment(runtime, inspection.gpus.variable)
    assert variables["CUDA_VISIBLE_DEVICES"] == ",".join(expected)
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    # Processes for untrusted code number GPUs alike.
    assert for_untrusted(variables).items() >= {
        ("CUDA_VISIBLE_DEVICES", ",".join(expected)),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    }


def test_process_without_gpu_list_keeps_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime, *_) = Runtimes(Path("/nowhere")).installed().values()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    variables = environment(runtime)
    assert variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@on_loop
async def test_only_one_mig_instance_is_used(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    inspection = await inspected(machine, A100_MIG)
    (first, *_) = A100_MIG[0].instances or ()
    assert uuids(inspection.gpus.gpus) == [first.uuid]
    assert inspection.node.resources.gpu_bytes == (40192 * MIB,)
    assert "7 MIG instances are not used" in caplog.text


@on_loop
async def test_gpu_memory_shared_with_cpu_counts_only_if_declared(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    inspection = await inspected(machine, GB10)
    assert inspection.node.resources.gpu_bytes == ()
    assert not inspection.has_gpus
    assert inspection.gpus.variable is None
    assert "shares the machine's memory" in caplog.text
    declared = await inspected(machine, GB10, "1x96GiB")
    assert declared.node.resources.gpu_bytes == (96 << 30,)
    assert declared.gpus.variable == GB10[0].gpu.uuid


@on_loop
async def test_declared_gpus_override_detected_gpus(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    two = await inspected(machine, H100, "2x40GiB")
    assert two.node.resources.gpu_bytes == (40 << 30,) * 2
    assert uuids(two.gpus.gpus) == [card.gpu.uuid for card in H100[:2]]
    none = await inspected(machine, H100, "0")
    assert (none.node.resources.gpu_bytes, none.has_gpus) == ((), False)
    assert caplog.text == ""
    more = await inspected(machine, H100[:1], "2x40GiB")
    assert more.node.resources.gpu_uuids == (None, None)
    assert not more.has_gpus
    assert "2 GPUs are declared (NDIF_NODE_GPUS) and 1 are present" in caplog.text


def test_node_with_changed_gpus_rejects_replica() -> None:
    counted = [card.gpu.uuid for card in H100[:2]]
    _check_gpus(counted, tuple(counted))
    for visible in (counted[:1], counted[::-1], []):
        with pytest.raises(ActorError, match="have changed since the node started"):
            _check_gpus(counted, visible)
    # Without detected GPUs there is nothing to compare.
    _check_gpus([None, None], ())
    _check_gpus([], counted)


@on_loop
async def test_concurrent_discoveries_share_one_node(machine: Machine, tmp_path: Path) -> None:
    machine.becomes(H100)
    fleet = ThisMachine(
        Settings(),
        MemoryBroker(),
        FileStore(tmp_path, 0),
        Runtimes(Path("/nowhere")),
        trusted=True,
        uses_placement=True,
    )
    (first,), (two,) = await asyncio.gather(fleet.discover(), fleet.discover())
    assert first is two
    assert len(first.resources.gpu_uuids) == 8
    await fleet.close()
