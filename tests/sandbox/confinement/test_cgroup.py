"""Cgroups of runners, in a folder that stands in for cgroupfs, so that the tests need no cgroup v2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ndif.sandbox.confinement.cgroup import CgroupError, RunnerCgroups


def a_cgroup(folder: Path, *, controllers: str = "cpu memory pids", processes: str = "") -> Path:
    """Make a folder with the files of a cgroup."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.controllers").write_text(f"{controllers}\n")
    (folder / "cgroup.procs").write_text(processes)
    (folder / "cgroup.subtree_control").write_text("")
    return folder


def of(root: Path, path: str) -> Path:
    """Return a file that names this process's cgroup, like /proc/self/cgroup."""
    file = root.parent / "own"
    file.write_text(f"1:name=systemd:/old\n0::{path}\n")
    return file


def delegated(folder: Path) -> None:
    try:
        os.setxattr(folder, "user.delegate", b"1")
    except OSError:
        pytest.skip("this file system has no attributes of users")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return a_cgroup(tmp_path / "cgroup")


def why(root: Path, path: str) -> str:
    with pytest.raises(CgroupError) as caught:
        RunnerCgroups.find(root, of(root, path))
    return str(caught.value)


def test_find_explains_why_no_cgroup_can_be_made(root: Path, tmp_path: Path) -> None:
    assert "version 1" in why(tmp_path, "/")
    assert "not delegated" in why(root, "/")
    a_cgroup(root / "session.scope")
    assert "not delegated" in why(root, "/session.scope")
    a_cgroup(root / "few.scope", controllers="cpu pids")
    assert "no controller 'memory'" in why(root, "/few.scope")


def test_delegated_cgroup_gets_server_child_and_controllers(root: Path) -> None:
    scope = a_cgroup(root / "ndif.scope", processes="11\n12\n")
    delegated(scope)
    cgroups = RunnerCgroups.find(root, of(root, "/ndif.scope"))
    assert cgroups.base == scope
    assert not (scope / "ndif-server").exists()
    cgroups.prepare()
    # The kernel accepts one process per write; this plain file holds the last one.
    assert (scope / "ndif-server" / "cgroup.procs").read_text() == "12"
    assert (scope / "cgroup.subtree_control").read_text() == "+memory +pids"
    # A server that is already in the child finds the same base.
    a_cgroup(scope / "ndif-server")
    assert RunnerCgroups.find(root, of(root, "/ndif.scope/ndif-server")).base == scope


def test_root_cgroup_of_container_is_used(root: Path) -> None:
    (root / "cgroup.type").write_text("domain\n")
    assert RunnerCgroups.find(root, of(root, "/")).base == root


def test_cgroup_limits_are_set_before_runner_is_moved(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = Path.write_text

    def noted(path: Path, text: str) -> int:
        written.append(f"{path.name}={text}")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", noted)
    RunnerCgroups(root).place(77, 2 << 30, 40)
    [_] = root.glob("ndif-runner-77-*")
    assert written[-1] == "cgroup.procs=77"
    assert set(written[:-1]) == {
        "memory.max=2147483648",
        "memory.swap.max=0",
        "memory.oom.group=1",
        "pids.max=40",
    }


def test_cgroups_of_ended_runners_are_removed(root: Path) -> None:
    cgroups = RunnerCgroups(root)
    empty, used = root / "ndif-runner-1-a", root / "ndif-runner-2-b"
    other = root / "other"
    for folder in (empty, used / "process", other):
        folder.mkdir(parents=True)
    cgroups.place(3, 1, 1)
    assert not empty.exists()
    assert used.exists()
    assert other.exists()
