"""The GPUs that a server uses: recorded machines, and a pretend driver."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.host import gpus
from ndif.host.gpus import (
    Driver,
    DriverError,
    Gpu,
    PhysicalGpu,
    find_gpus,
    select_visible,
    without_memory,
)
from tests.host.machines import (
    A100_40_MIG,
    A100_MIG,
    GB10,
    H100,
    MACHINES,
    MIB,
    MIXED,
    Machine,
)
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.process

SMALL, LARGE = MIXED[0].gpu, MIXED[1].gpu
MIG = A100_MIG[0].instances or ()


def named(cards: Sequence[PhysicalGpu], **variables: str) -> list[str]:
    return [gpu.uuid for gpu in select_visible(cards, variables).gpus]


def uuids(cards: Sequence[PhysicalGpu], *indices: int) -> list[str]:
    return [cards[index].gpu.uuid for index in indices]


# Without any variable


def test_all_gpus_are_used_in_pci_bus_order() -> None:
    assert named(MIXED[::-1]) == uuids(MIXED, 0, 1, 2, 3, 4)
    assert named(H100) == uuids(H100, *range(8))
    # 0F comes after 07 and before 0001:00, whatever the driver counts first.
    far = replace(H100[0], pci="00000001:01:00.0")
    assert named([far, H100[7], H100[2]]) == uuids([H100[2], H100[7], far], 0, 1, 2)


def test_reserved_memory_is_not_usable() -> None:
    assert H100[0].gpu.usable_bytes == (81559 - 454) * MIB


def test_variable_of_process_lists_uuids() -> None:
    selection = select_visible(H100, {"CUDA_VISIBLE_DEVICES": "3,1"})
    assert selection.variable == ",".join(uuids(H100, 3, 1))
    # Reading the variable again gives the same GPUs, in the same order.
    assert select_visible(H100, {"CUDA_VISIBLE_DEVICES": selection.variable}).gpus == selection.gpus
    assert select_visible((), {}).variable is None


# CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("2,1", (2, 1)),
        (" 2 , 1 ", (2, 1)),
        ("0,2,-1,1", (0, 2)),
        ("0,8,1", (0,)),
        ("-1", ()),
        ("", ()),
        ("NoDevFiles", ()),
        ("none", ()),
        ("1,1", ()),
        ("0,1,2,0", ()),
        ("1x,2y", (1, 2)),
        ("+1", (1,)),
        ("GPU-7c3cadbd-17e5-0913-f69b-c618122ea0cd", (1,)),
        ("GPU-7c3,GPU-b", (1, 0)),
        ("GPU-7c3,GPU-ffff,GPU-b", (1,)),
        ("GPU-", ()),
        ("GPU-7c3,GPU-7c3cad", ()),
        ("GPU-7c3,0", (1,)),
        ("0,GPU-7c3", (0,)),
        ("gpu-7c3", ()),
        ("MIG-7c3", ()),
    ],
)
def test_device_list_is_parsed_like_cuda(text: str, indices: tuple[int, ...]) -> None:
    assert named(H100, CUDA_VISIBLE_DEVICES=text) == uuids(H100, *indices)


def test_ignored_list_entries_are_reported() -> None:
    (note,) = select_visible(H100, {"CUDA_VISIBLE_DEVICES": "0,9,1"}).notes
    assert "'9' names no GPU of this machine" in note
    (note,) = select_visible(H100, {"CUDA_VISIBLE_DEVICES": "GPU-7c3,GPU-7c3c"}).notes
    assert "names a GPU twice" in note
    for nothing in ("", "-1", "0,-1"):
        assert select_visible(H100, {"CUDA_VISIBLE_DEVICES": nothing}).notes == ()


def test_container_uses_all_gpus_of_its_driver() -> None:
    assert named(H100[2:4], NVIDIA_VISIBLE_DEVICES="2,3") == uuids(H100, 2, 3)
    assert named(H100[2:4], NVIDIA_VISIBLE_DEVICES="2,3", CUDA_VISIBLE_DEVICES="1") == uuids(
        H100, 3
    )


@given(st.text("0123-,GPUMIGb7 \t", max_size=20))
def test_any_list_selects_distinct_existing_gpus(text: str) -> None:
    uuids_named = named(H100, CUDA_VISIBLE_DEVICES=text)
    assert len(set(uuids_named)) == len(uuids_named)
    assert set(uuids_named) <= set(uuids(H100, *range(8)))


# Slurm


def test_cuda_list_has_precedence_in_slurm_job() -> None:
    # With ConstrainDevices a job sees only its two cards, and their numbers begin at 0.
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert named(H100[4:6], **job) == uuids(H100, 4, 5)
    # Without, it sees all of them.
    job["CUDA_VISIBLE_DEVICES"] = "4,5"
    assert named(H100, **job) == uuids(H100, 4, 5)


def test_slurm_variables_apply_if_cuda_list_is_unset() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "4,5"}
    assert named(H100[4:6], **job) == uuids(H100, 4, 5)
    assert named(H100, **job) == uuids(H100, 4, 5)
    assert named(H100, **job, SLURM_STEP_GPUS="5") == uuids(H100, 5)
    assert named(H100, **job, GPU_DEVICE_ORDINAL="1") == uuids(H100, 1)
    # Its ids are the numbers of device files, which need not be in the bus's order.
    swapped = [replace(H100[0], minor=1), replace(H100[1], minor=0), H100[2]]
    assert named(swapped, SLURM_JOB_GPUS="0") == uuids(H100, 1)


def test_gpu_device_ordinal_is_ignored_outside_slurm_job() -> None:
    assert named(H100, GPU_DEVICE_ORDINAL="1") == uuids(H100, *range(8))
    assert named(H100, SLURM_JOB_GPUS="gpu:2") == uuids(H100, *range(8))


# Divided cards


def test_one_mig_instance_is_used() -> None:
    selection = select_visible(A100_MIG, {})
    assert selection.gpus == (MIG[0],)
    (note,) = selection.notes
    assert note.startswith("7 MIG instances are not used")


@pytest.mark.parametrize(
    ("text", "used"),
    [
        (MIG[2].uuid, MIG[2]),
        ("MIG-3fff", MIG[2]),
        (f"{MIG[1].uuid},{MIG[0].uuid}", MIG[1]),
        ("0", MIG[0]),
        ("GPU-8e1", MIG[0]),
    ],
)
def test_mig_instance_is_selected_by_its_uuid_or_its_gpu(text: str, used: Gpu) -> None:
    assert select_visible(A100_MIG, {"CUDA_VISIBLE_DEVICES": text}).gpus == (used,)


def test_old_mig_names_from_before_driver_470_are_recognised() -> None:
    second = (A100_40_MIG[0].instances or ())[1]
    assert named(A100_40_MIG, CUDA_VISIBLE_DEVICES=second.uuid) == [second.uuid]


def test_whole_gpus_have_precedence_over_mig_instances() -> None:
    whole = replace(A100_MIG[1], instances=None)
    selection = select_visible([A100_MIG[0], whole], {})
    assert selection.gpus == (whole.gpu,)
    assert selection.notes[0].startswith("4 MIG instances are not used")
    assert select_visible([A100_MIG[0], whole], {"CUDA_VISIBLE_DEVICES": "MIG-6b84"}).gpus == (
        MIG[1],
    )


def test_mig_gpu_without_instances_is_not_used() -> None:
    bare = replace(A100_MIG[0], instances=())
    selection = select_visible([bare, H100[0]], {})
    assert selection.gpus == (H100[0].gpu,)
    assert selection.notes == (
        f"NVIDIA A100-SXM4-80GB ({bare.gpu.uuid}) is in MIG mode and has no instance: it is not used.",
    )


# Memory that CPU and GPU share


def test_unknown_memory_size_stays_unknown() -> None:
    (gpu,) = select_visible(GB10, {}).gpus
    assert gpu.total_bytes is None
    assert gpu.usable_bytes is None
    assert "NDIF_NODE_GPUS" in without_memory(gpu)


# The driver, replaced by a pretend library


@pytest.mark.parametrize("name", MACHINES)
@on_loop
async def test_driver_reports_all_gpus_of_machine(name: str, machine: Machine) -> None:
    machine.becomes(MACHINES[name])
    driver = Driver()
    assert await driver.physical_gpus() == (list(MACHINES[name]), [])
    await driver.close()


@on_loop
async def test_driver_before_510_reports_no_reserved_memory(machine: Machine) -> None:
    machine.becomes(H100, "old")
    driver = Driver()
    cards, _ = await driver.physical_gpus()
    assert {card.gpu.total_bytes for card in cards} == {81559 * MIB}
    assert {card.gpu.reserved_bytes for card in cards} == {0}
    await driver.close()


@on_loop
async def test_lost_gpu_does_not_shift_others(machine: Machine) -> None:
    machine.becomes(H100[:3], "lost 1")
    driver = Driver()
    selection = await find_gpus(driver, {})
    assert [gpu.uuid for gpu in selection.gpus] == uuids(H100, 0, 2)
    assert selection.notes == ("GPU 1: GPU is lost: it is not used.",)
    await driver.close()


@on_loop
async def test_driver_reports_memory_by_process(machine: Machine) -> None:
    first_uuid, two = uuids(H100, 0, 1)
    machine.becomes(
        H100[:2], f"process {first_uuid} 41 {5 << 20}", f"process {first_uuid} 42 {6 << 20}"
    )
    driver = Driver()
    assert await driver.processes() == {first_uuid: {41: 5 << 20, 42: 6 << 20}, two: {}}
    instance = MIG[1].uuid
    machine.becomes(A100_MIG[:1], f"process {instance} 43 7")
    assert (await driver.processes())[instance] == {43: 7}
    await driver.close()


@on_loop
async def test_hanging_driver_is_abandoned_and_queried_again_later(machine: Machine) -> None:
    machine.becomes((), "hang")
    driver = Driver(timeout_s=1)
    selection = await find_gpus(driver, {})
    assert selection == gpus.VisibleGpus(
        (), ("No GPU is used: the NVIDIA driver did not answer within 1s.",)
    )
    # Once it answers again it is asked again.
    driver.timeout_s = PATIENCE_S
    machine.becomes(H100)
    assert len((await find_gpus(driver, {})).gpus) == 8
    await driver.close()


@on_loop
async def test_driver_version_mismatch_is_reported(machine: Machine) -> None:
    machine.becomes((), "mismatch")
    driver = Driver()
    (note,) = (await find_gpus(driver, {})).notes
    assert (
        note
        == "No GPU is used: the NVIDIA driver says RM has detected an NVML/RM version mismatch."
    )
    await driver.close()


@on_loop
async def test_ended_driver_process_is_restarted(machine: Machine) -> None:
    machine.becomes(H100)
    driver = Driver()
    await driver.physical_gpus()
    await driver.close()
    cards, _ = await driver.physical_gpus()
    assert len(cards) == 8
    await driver.close()


# Machines without a driver


@on_loop
async def test_machine_without_driver_has_no_gpu_and_no_note() -> None:
    driver = Driver()
    with pytest.raises(DriverError) as caught:
        await driver.physical_gpus()
    assert caught.value.absent
    assert await find_gpus(driver, dict(os.environ)) == gpus.VisibleGpus()
    await driver.close()


def test_container_without_driver_library_is_reported(tmp_path: Path) -> None:
    absent = DriverError("the NVIDIA driver says NVML Shared Library Not Found", absent=True)
    assert gpus._explain_missing(absent, tmp_path) == []
    (tmp_path / "nvidia0").touch()
    (note,) = gpus._explain_missing(absent, tmp_path)
    assert "NVIDIA_DRIVER_CAPABILITIES" in note


@on_loop
async def test_driver_query_can_be_cancelled(machine: Machine) -> None:
    machine.becomes((), "hang")
    driver = Driver()
    asking = asyncio.create_task(driver.physical_gpus())
    await eventually(lambda: driver._process is not None)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    machine.becomes(H100[:1])
    assert len((await driver.physical_gpus())[0]) == 1
    await driver.close()
