"""Facts about this machine, and the binding of model processes to CPUs near their GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nnsight import TransformersModel

from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.host.environment import (
    bind,
    cpu_memory,
    cpus_by_node,
    environment,
    nearby_cpus,
    parse_cpu_list,
)
from ndif.host.model_actor import ReplicaDevices
from ndif.host.runtimes import Runtime
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.replica import (
    expected,
    reading,
    serve,
)
from tests.waiting import eventually

GiB = 1 << 30

# Two sockets of an eight-GPU machine, from `nvidia-smi topo -m`: GPUs 0-3 on node 0, 4-7 on node 1.
NODES = {0: frozenset([*range(24), *range(48, 72)]), 1: frozenset([*range(24, 48), *range(72, 96)])}
ALL = NODES[0] | NODES[1]


def test_secret_variables_do_not_reach_model_process(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [
        n for n, info in Settings.model_fields.items() if "SecretStr" in str(info.annotation)
    ]
    names = {name_of(name) for name in secrets}
    assert {"NDIF_SMTP_URL", "NDIF_CALLBACK_SECRET", "MAILGUN_API_KEY"} <= names
    for name in names:
        monkeypatch.setenv(name, "a secret")
    runtime = Runtime("0.8", "0.8.1", Path(sys.executable), ())
    assert not names & environment(runtime).keys()


def test_process_is_bound_to_cpus_of_its_numa_node() -> None:
    assert nearby_cpus([0], NODES, ALL) == NODES[0]
    assert nearby_cpus([1, 1, 1], NODES, ALL) == NODES[1]


def test_gpus_of_both_numa_nodes_leave_process_unbound() -> None:
    assert nearby_cpus([0, 1], NODES, ALL) is None


def test_unknown_numa_nodes_leave_process_unbound() -> None:
    assert nearby_cpus([None], NODES, ALL) is None
    assert nearby_cpus([0, None], NODES, ALL) is None
    assert nearby_cpus([7], NODES, ALL) is None
    assert nearby_cpus([], NODES, ALL) is None


def test_only_allowed_cpus_are_chosen() -> None:
    job = frozenset([2, 3, 30, 31])
    assert nearby_cpus([0], NODES, job) == {2, 3}
    assert nearby_cpus([1], NODES, frozenset([2, 3])) is None
    assert nearby_cpus([0], NODES, frozenset([2, 3])) is None  # all of them are near
    assert nearby_cpus([0, 1], NODES, job | {90}) is None


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,5\n", {0, 1, 2, 5}), ("7\n", {7}), ("\n", set()), ("0-1,4-5,9", {0, 1, 4, 5, 9})],
)
def test_cpu_list_of_kernel_is_parsed(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_numa_nodes_are_read_from_sysfs(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-3\n"), (1, "4-7\n"), (252, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    (tmp_path / "node2").mkdir()
    cpus_of_nodes = {0: frozenset(range(4)), 1: frozenset(range(4, 8)), 252: frozenset()}
    assert cpus_by_node(tmp_path) == cpus_of_nodes
    # A NUMA node of GPU memory alone has no CPUs, and binds no process.
    assert nearby_cpus([252], cpus_of_nodes, frozenset(range(8))) is None
    assert cpus_by_node(tmp_path / "missing") == {}


several = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one CPU")

THREADS = """
import threading, time
for _ in range(3):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


def affinities(pid: int) -> set[frozenset[int]]:
    threads = Path(f"/proc/{pid}/task").glob("[0-9]*")
    return {frozenset(os.sched_getaffinity(int(thread.name))) for thread in threads}


@pytest.mark.process
@several
def test_every_thread_is_bound() -> None:
    cpu = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-Sc", THREADS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert affinities(process.pid) != {frozenset([cpu])}
        bind(process.pid, [cpu])
        assert affinities(process.pid) == {frozenset([cpu])}
        process.kill()


@pytest.mark.process
def test_binding_ended_process_is_no_error() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        process.wait()
    bind(process.pid, os.sched_getaffinity(0))


@pytest.mark.process
@several
@on_loop
async def test_replica_is_bound_to_cpus_near_its_gpus(tiny_gpt2: Path) -> None:
    client = TransformersModel(str(tiny_gpt2), task="text-generation")
    cpu = max(os.sched_getaffinity(0))
    asked = []

    def beside(gpus: object) -> list[int]:
        asked.append(gpus)
        return [cpu]

    devices = ReplicaDevices({3: 1 << 30}, device="cpu", near=beside)
    async with serve(tiny_gpt2, devices=devices) as served:
        assert [[*descriptors] for descriptors in asked] == [[3]]
        await eventually(lambda: len(children(served.zygote)) == 2)
        for pid in (served.zygote, *children(served.zygote)):
            assert affinities(pid) == {frozenset([cpu])}
        logits = await served.logits(reading(client))
        assert logits.allclose(expected(tiny_gpt2), atol=1e-5)


def test_cpu_memory_is_at_most_physical_memory() -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < cpu_memory() <= whole


def test_container_limit_caps_cpu_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemFree:        1 kB\n")
    limit = tmp_path / "memory.max"
    missing = tmp_path / "none"
    for text, limit_bytes in (
        ("max\n", 16 * GiB),
        (f"{4 * GiB}\n", 4 * GiB),
        (f"{1 << 63}\n", 16 * GiB),
    ):
        limit.write_text(text)
        assert cpu_memory(meminfo, (missing, limit)) == limit_bytes
