"""Session folders: exclusive start, remains of ended sessions, and detection of the server's process."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndif.launch.run_folder import (
    ActiveRunFolder,
    RunFolderError,
    RunFolders,
    RunRecord,
    started_at,
)
from tests.waiting import until

pytestmark = pytest.mark.process

BEGIN = """
import sys, time
from pathlib import Path
from ndif.launch.run_folder import RunFolderError, RunFolders, RunRecord

try:
    session = RunFolders(Path(sys.argv[1])).create()
except RunFolderError as error:
    print(error, flush=True)
    raise SystemExit(1)
session.publish(RunRecord.of_this_process(session.id, url="http://u", host="h", port=1, version="v",
                                          arguments=[], settings={}))
print(session.id, flush=True)
time.sleep(600)
"""


def record(session: ActiveRunFolder) -> RunRecord:
    return RunRecord.of_this_process(
        session.id,
        url="http://127.0.0.1:8001",
        host="127.0.0.1",
        port=8001,
        version="0.1.0",
        arguments=["--port", "8001"],
        settings={"NDIF_RUNNER_POOL": 5},
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of a server with a session in `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, tmp_path], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_session_folder_follows_specification(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    sessions = RunFolders(root)
    session = sessions.create()
    assert sessions.current() is None
    session.publish(record(session))

    assert session.folder.parent == root
    assert time.strptime(session.id, "session_%Y%m%d_%H%M%S")
    assert (root / "current").is_symlink()
    assert (root / "current").readlink() == Path(session.id)
    assert session.log() == session.folder / "logs" / "api" / "output.log"
    assert session.log().parent.is_dir()
    assert json.loads((session.folder / "config.json").read_text()) == {
        "session_id": session.id,
        "pid": os.getpid(),
        "pid_started": started_at(os.getpid()),
        "url": "http://127.0.0.1:8001",
        "host": "127.0.0.1",
        "port": 8001,
        "started": record(session).started,
        "version": "0.1.0",
        "arguments": ["--port", "8001"],
        "settings": {"NDIF_RUNNER_POOL": 5},
        "node_type": "head",
        "admin_host": "",
        "admin_port": 0,
        "services": {},
    }
    assert len(session.token() or "") >= 32
    assert mode(session.folder) == 0o700
    assert mode(session.folder / "token") == 0o600
    assert mode(session.folder / "config.json") == 0o600
    session.end()


def test_ended_session_keeps_log_and_record(tmp_path: Path) -> None:
    sessions = RunFolders(tmp_path)
    session = sessions.create()
    session.publish(record(session))
    session.log().write_text("line\n")
    (session.results / "large.pt").write_bytes(b"x")
    running = sessions.running()
    assert running is not None
    session.end()
    assert sessions.running() is None
    assert sessions.current() is None
    assert not (tmp_path / "current").is_symlink()
    latest = sessions.latest()
    assert latest is not None
    assert latest.folder == session.folder
    assert latest.log().read_text() == "line\n"
    assert latest.token() is None
    assert latest.record() is not None


def test_results_move_to_next_session(tmp_path: Path) -> None:
    sessions = RunFolders(tmp_path)
    first = sessions.create()
    (first.results / "large.pt").write_bytes(b"x")
    first.end()
    second = sessions.create()
    assert not first.results.exists()
    assert (second.results / "large.pt").read_bytes() == b"x"
    second.end()


def test_results_and_signing_key_survive_failed_start(tmp_path: Path) -> None:
    sessions = RunFolders(tmp_path)
    first = sessions.create()
    (first.results / "large.pt").write_bytes(b"x")
    signing = first.signing_key()
    first.end()
    sessions.create().discard()
    third = sessions.create()
    assert (third.results / "large.pt").read_bytes() == b"x"
    assert third.signing_key() == signing
    third.end()


def test_discarded_session_leaves_no_files(tmp_path: Path) -> None:
    session = RunFolders(tmp_path).create()
    session.publish(record(session))
    session.discard()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    RunFolders(tmp_path).create().discard()


def test_sessions_created_in_same_second_have_distinct_ids(tmp_path: Path) -> None:
    ids = set()
    for _ in range(3):
        session = RunFolders(tmp_path).create()
        ids.add(session.id)
        session.end()
    assert len(ids) == 3


def test_second_server_is_rejected_and_changes_nothing(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    name = first_line(other)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(RunFolderError) as refused:
        RunFolders(tmp_path).create()
    assert f"running already at http://u (process {other.pid})" in str(refused.value)
    assert "NDIF_SESSION_ROOT" in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    running = RunFolders(tmp_path).running()
    assert running is not None
    assert running[0].id == name


def test_only_one_of_concurrent_servers_starts(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", BEGIN, tmp_path], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    try:
        lines = [first_line(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert sum(line.startswith("session_") for line in lines) == 1, lines
    assert sum("running already" in line for line in lines) == 5, lines


def test_new_session_replaces_session_of_killed_server(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    name = first_line(other)
    other.send_signal(signal.SIGKILL)
    other.wait()
    sessions = RunFolders(tmp_path)
    assert sessions.current() is not None
    assert sessions.running() is None
    session = sessions.create()
    assert session.stale is not None
    assert session.stale.id == name
    assert session.stale.token() is None
    session.publish(record(session))
    current = sessions.current()
    assert current is not None
    assert current.folder == session.folder
    session.end()


def test_reused_pid_does_not_count_as_alive(tmp_path: Path) -> None:
    session = RunFolders(tmp_path).create()
    mine = record(session)
    assert mine.is_alive
    assert not RunRecord(**{**vars(mine), "pid_started": mine.pid_started - 1}).is_alive
    session.end()


def test_zombie_process_has_no_start_time() -> None:
    process = subprocess.Popen(["true"])
    status = Path(f"/proc/{process.pid}/stat")
    until(lambda: status.read_text().rpartition(")")[2].split()[0] == "Z")
    assert started_at(process.pid) is None
    process.wait()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "null"])
def test_unreadable_record_is_none(tmp_path: Path, content: str) -> None:
    session = RunFolders(tmp_path).create()
    session.publish(record(session))
    (session.folder / "config.json").write_text(content)
    assert session.record() is None
    assert RunFolders(tmp_path).running() is None
    session.end()


def test_unwritable_session_root_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot be kept in .*file.*NDIF_SESSION_ROOT"):
        RunFolders(tmp_path / "file").create()
