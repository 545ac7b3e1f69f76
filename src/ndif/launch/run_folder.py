"""The folder of one run of the server, from `ndif start` to `ndif stop`; operators call it a session.

```
~/.ndif/
├── .lock                               locked by the server's process for as long as it lives
├── current -> session_20250121_143052
└── session_20250121_143052/
    ├── config.json                     record of the run: process, address, options
    ├── token                           bearer token of /admin/*
    ├── logs/api/output.log             likewise logs/dispatcher and one for each service of the run
    ├── results/                        results and responses until they are fetched or expire, and polled
    │                                   jobs that have not ended; the next run takes them over
    └── data/                           data of the run's services, removed when it ends
```

A service that runs without a server has a run folder of its own in ~/.ndif/services/NAME.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

from ndif.errors import NdifError
from ndif.stores.disk import open_private

LOG_NAMES = ("api", "dispatcher", "broker", "object-store", "ray")
"""Programs with a log of their own; the first two are the server."""

NodeType = Literal["head", "worker"]
"""A worker is a node of another machine's cluster."""

_PREFIX = "session_"
_CURRENT = "current"
_LOCK = ".lock"
_TOKEN_BYTES = 32
_LOG_LINES = 15
_ATTEMPTS, _PAUSE_S = 5, 0.1
_START_TIME_FIELD = 19
"""Index of the start time in /proc/PID/stat, counted from the process's state."""


class RunFolderError(NdifError):
    """The folder of a run cannot be created, or another run holds its lock."""


def started_at(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if there is no such process."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie has ended.
    return None if after_name[0] == "Z" else int(after_name[_START_TIME_FIELD])


@dataclass(frozen=True)
class ServiceRecord:
    """A service that a run uses."""

    address: str
    ours: bool
    """True if it stops with this run."""


@dataclass(frozen=True)
class RunRecord:
    """Content of `config.json`: the facts about a run that other commands need."""

    session_id: str
    pid: int
    pid_started: int
    """Start of the process in ticks since boot, because a later process may have the same PID."""
    url: str
    """Address for clients."""
    host: str
    """Address that the server listens on."""
    port: int
    started: str
    version: str
    arguments: list[str] = field(default_factory=list)
    """Arguments of `ndif start`, with absolute paths."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Variables that differ from their default, without secrets."""
    node_type: NodeType = "head"
    admin_host: str = ""
    admin_port: int = 0
    """Port of /admin/* if it has an address of its own, else 0."""
    services: dict[str, ServiceRecord] = field(default_factory=dict)

    @classmethod
    def of_this_process(cls, session_id: str, **fields: Any) -> RunRecord:
        """Return the record of a run that this process starts now; `fields` are the other fields."""
        pid = os.getpid()
        return cls(
            session_id=session_id,
            pid=pid,
            pid_started=started_at(pid) or 0,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **fields,
        )

    @property
    def is_alive(self) -> bool:
        """Return True while the run's process lives."""
        return started_at(self.pid) == self.pid_started


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, for any process that reads it."""

    folder: Path

    @property
    def id(self) -> str:
        """Return the folder's name, which is the session's id."""
        return self.folder.name

    @property
    def results(self) -> Path:
        """Return the folder of stored results and responses."""
        return self.folder / "results"

    def service_data(self, name: str) -> Path:
        """Make and return the folder of one service's data, which is removed when the run ends."""
        path = self.folder / "data" / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def log(self, name: str = LOG_NAMES[0]) -> Path:
        """Return the log of the server or of a service."""
        return self.folder / "logs" / name / "output.log"

    def token(self) -> str | None:
        """Return the token of /admin/*; None after the run, or without permission to read it."""
        try:
            return (self.folder / "token").read_text().strip() or None
        except OSError:
            return None

    def signing_key(self) -> str:
        """Return the key that signs the addresses of results; it moves with the results to the next run."""
        # Imported here: other commands read run folders and need no store.
        from ndif.stores.objects.files import signing_key

        return signing_key(self.results)

    def record(self) -> RunRecord | None:
        """Return the run's record; None if it cannot be read."""
        try:
            content = json.loads((self.folder / "config.json").read_text())
            services = content.get("services", {})
            content["services"] = {
                name: ServiceRecord(**fields) for name, fields in services.items()
            }
            # The record of an older server lacks the newer fields, which have defaults.
            return RunRecord(**content)
        except (OSError, ValueError, TypeError, AttributeError):
            return None


class RunFolders:
    """All run folders below one root.

    At most one of them belongs to a running process, which holds a lock of the operating system. A process
    that is killed releases it.
    """

    def __init__(self, root: Path, service: str | None = None) -> None:
        """Use the run folders below `root`; `service` names a service that runs there without a server."""
        self.root = root.expanduser().absolute()
        self._service = service

    def current(self) -> RunFolder | None:
        """Return the run folder that the link `current` names, even if its process has ended."""
        try:
            folder = self.root / (self.root / _CURRENT).readlink()
        except OSError:
            return None
        return RunFolder(folder) if folder.is_dir() else None

    def running(self) -> tuple[RunFolder, RunRecord] | None:
        """Return the current run folder and its record if its process lives."""
        run_folder = self.current()
        record = run_folder.record() if run_folder else None
        return (run_folder, record) if run_folder and record and record.is_alive else None

    def latest(self) -> RunFolder | None:
        """Return the current run folder, else the newest one."""
        folders = sorted(folder for folder in self.root.glob(f"{_PREFIX}*") if folder.is_dir())
        return self.current() or (RunFolder(folders[-1]) if folders else None)

    def of_service(self, name: str) -> RunFolders:
        """Return the run folders of a service that runs without a server."""
        return RunFolders(self.root / "services" / name, name)

    def create(self, *logs: str) -> ActiveRunFolder:
        """Create and lock a run folder with these logs; raise a `RunFolderError` if another run lives."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = self._lock()
        except OSError as error:
            raise RunFolderError(
                f"Sessions cannot be kept in {self.root} ({error.strerror}). Choose another folder with "
                "the variable NDIF_SESSION_ROOT."
            ) from error
        try:
            stale = self.current()  # its process has ended, because the lock was free
            if stale is not None:
                self.retire(stale)
            return ActiveRunFolder(self._create(logs or LOG_NAMES[:2]), self, lock, stale)
        except BaseException:
            os.close(lock)
            raise

    def retire(self, run_folder: RunFolder) -> None:
        """Remove the parts that are valid only during the run: `current`, the token and services' data."""
        if self.current() in (None, RunFolder(run_folder.folder)):
            (self.root / _CURRENT).unlink(missing_ok=True)
        (run_folder.folder / "token").unlink(missing_ok=True)
        rmtree(run_folder.folder / "data", ignore_errors=True)

    def already_running(self) -> str:
        """Return the message for a second start."""
        running = self.running()
        where = f" at {running[1].url} (process {running[1].pid})" if running else ""
        is_worker = running is not None and running[1].node_type == "worker"
        kind = self._service or ("worker" if is_worker else "server")
        stop = "ndif stop --services" if self._service else "ndif stop"
        article = "An" if kind == "object-store" else "A"
        return (
            f"{article} {kind} is running already{where}. Stop it with `{stop}`, or give this one a folder "
            "of its own with the variable NDIF_SESSION_ROOT."
        )

    def _lock(self) -> int:
        lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            # The holder of the lock may be about to end.
            time.sleep(_PAUSE_S)
        os.close(lock)
        raise RunFolderError(self.already_running())

    def _create(self, logs: Sequence[str]) -> Path:
        name = f"{_PREFIX}{time.strftime('%Y%m%d_%H%M%S')}"
        for suffix in itertools.chain([""], (f"_{number}" for number in itertools.count(2))):
            with contextlib.suppress(FileExistsError):
                folder = self.root / f"{name}{suffix}"
                folder.mkdir(mode=0o700)
                break
        for log in logs:
            (folder / "logs" / log).mkdir(parents=True)
        self._take_over_results(RunFolder(folder))
        with open_private(folder / "token") as token:
            token.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
        return folder

    def _take_over_results(self, run_folder: RunFolder) -> None:
        """Move the results of the previous run into this one, so that its clients find them."""
        for results in sorted(self.root.glob(f"{_PREFIX}*/results"), reverse=True):
            if run_folder.results.exists():
                rmtree(results, ignore_errors=True)
            else:
                results.rename(run_folder.results)
        run_folder.results.mkdir(exist_ok=True)


@dataclass(frozen=True)
class ActiveRunFolder(RunFolder):
    """The run folder of this process, which holds the lock."""

    run_folders: RunFolders
    lock: int
    stale: RunFolder | None
    """Run folder of a process that ended without retiring it."""

    def publish(self, record: RunRecord) -> None:
        """Write the record and make this run folder the current one, so that other commands find it."""
        part = self.folder / ".config.json"
        with open_private(part) as file:
            json.dump(asdict(record), file, indent=2)
        part.replace(self.folder / "config.json")
        link = self.run_folders.root / f".{_CURRENT}-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.folder.name)
        link.replace(self.run_folders.root / _CURRENT)

    def end(self) -> None:
        """Retire the run folder and release the lock; the record, logs and results stay."""
        self.run_folders.retire(self)
        os.close(self.lock)

    def discard(self) -> None:
        """Remove the run folder and move its results back, as if the run had never begun."""
        self.run_folders.retire(self)
        others = set(self.run_folders.root.glob(f"{_PREFIX}*")) - {self.folder}
        if others:  # the next run takes the results over from there
            self.results.rename(RunFolder(max(others)).results)
        rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def failed_start(subject: str, log: Path) -> str:
    """Return the message that `subject` did not come up, with the end of its log."""
    lines = log_end(log)
    if not lines:
        return f"{subject} did not come up, and logged nothing."
    return "\n".join([f"{subject} did not come up. The end of its log:", *lines])


def log_end(log: Path) -> list[str]:
    """Return the last lines of a log; none if it cannot be read."""
    try:
        return log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return []


def within(seconds: float, is_done: Callable[[], bool]) -> bool:
    """Wait until `is_done()` is true; return False if that takes more than `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True
