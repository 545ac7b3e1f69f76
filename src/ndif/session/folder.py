"""One run of the server as files, from `ndif start` to `ndif stop` (specification, section 11.1).

~/.ndif/
├── .lock                               held by the server's process for as long as it lives
├── current -> session_20250121_143052
└── session_20250121_143052/
    ├── config.json                     what it was started with
    ├── token                           for /admin/*
    ├── logs/api/output.log, logs/dispatcher/output.log, and of services that it started
    ├── results/                        results and responses, until they are fetched or expire; of a
    │                                   session that has ended, until the next has them
    └── data/                           of services that it started, for as long as they run

A service that runs without a server has a session of its own in ~/.ndif/services/NAME.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shutil import rmtree
from typing import Any

from ndif.session.record import Record

SERVICES = ("api", "dispatcher", "broker", "object-store", "ray")
"""What has a log of its own."""

_PREFIX = "session_"
_CURRENT = "current"
_LOCK = ".lock"
_SIGNING = ".signing"
_TOKEN_BYTES = 32
_ATTEMPTS, _PAUSE_S = 5, 0.1


class SessionError(Exception):
    """A session cannot begin; the message says what to do."""


@dataclass(frozen=True)
class Session:
    """One session's folder."""

    folder: Path

    @property
    def id(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def results(self) -> Path:
        """Where large results lie."""
        return self.folder / "results"

    @property
    def data(self) -> Path:
        """Where services of the session keep theirs."""
        return self.folder / "data"

    def log(self, service: str = SERVICES[0]) -> Path:
        """Where a service writes what it does."""
        return self.folder / "logs" / service / "output.log"

    def token(self) -> str | None:
        """What opens /admin/*; None once the session has ended, or to whom may not read it."""
        try:
            return (self.folder / "token").read_text().strip() or None
        except OSError:
            return None

    def signing(self) -> str:
        """With which addresses of results are signed, here and in the session that has them next."""
        return (self.results / _SIGNING).read_text()

    def record(self) -> Record | None:
        """What it was started with; None if that cannot be read."""
        try:
            found = json.loads((self.folder / "config.json").read_text())
            # An older server's lacks what was not written down then.
            return Record(
                **{each.name: found[each.name] for each in fields(Record) if each.name in found}
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Sessions:
    """A folder of sessions, of which one at most is running."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()

    def current(self) -> Session | None:
        """The one that `current` leads to, alive or not."""
        try:
            folder = self.root / (self.root / _CURRENT).readlink()
        except OSError:
            return None
        return Session(folder) if folder.is_dir() else None

    def running(self) -> tuple[Session, Record] | None:
        """The one whose server lives."""
        session = self.current()
        record = session.record() if session else None
        return (session, record) if session and record and record.is_alive else None

    def latest(self) -> Session | None:
        """The one that began last."""
        found = sorted(folder for folder in self.root.glob(f"{_PREFIX}*") if folder.is_dir())
        return self.current() or (Session(found[-1]) if found else None)

    def of(self, service: str) -> Sessions:
        """Those of a service that runs without a server."""
        return Sessions(self.root / "services" / service)

    def begin(self, *services: str) -> Own:
        """A new session for this process, with logs of `services`.

        Raises:
            SessionError: if another server has one here, or the folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = self._lock()
        except OSError as error:
            raise SessionError(
                f"Sessions cannot be kept in {self.root} ({error.strerror}). Choose another folder with "
                "the variable NDIF_SESSION_ROOT."
            ) from error
        try:
            stale = self._take_over()
            return Own(
                self._folder(services or SERVICES[:2]), root=self.root, lock=lock, stale=stale
            )
        except BaseException:
            os.close(lock)
            raise

    def forget(self, session: Session) -> None:
        """Let `current` lead to it no more, and remove what was good only while it ran."""
        current = self.current()
        if current is not None and current.folder == session.folder:
            (self.root / _CURRENT).unlink(missing_ok=True)
        (session.folder / "token").unlink(missing_ok=True)
        rmtree(session.data, ignore_errors=True)

    def _lock(self) -> int:
        # Kept by the system, not by us: a process that is killed holds nothing.
        lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            # One that is just ending is waited for.
            time.sleep(_PAUSE_S)
        os.close(lock)
        raise SessionError(self.occupied())

    def occupied(self) -> str:
        """What to say to a second server."""
        running = self.running()
        where = f" at {running[1].url} (process {running[1].pid})" if running else ""
        return (
            f"A server is running already{where}. Stop it with `ndif stop`, or give this one a folder of "
            "its own with the variable NDIF_SESSION_ROOT."
        )

    def _take_over(self) -> Session | None:
        """Who held the lock is gone: what still calls itself current is stale."""
        stale = self.current()
        if stale is not None:
            self.forget(stale)
        (self.root / _CURRENT).unlink(missing_ok=True)
        return stale

    def _inherit(self, session: Session) -> None:
        """Have what jobs of the session before have come to found in this one."""
        for results in sorted(self.root.glob(f"{_PREFIX}*/results"), reverse=True):
            if session.results.exists():
                rmtree(results, ignore_errors=True)
            else:
                results.rename(session.results)
        session.results.mkdir(exist_ok=True)
        with (
            contextlib.suppress(FileExistsError),
            _private(session.results / _SIGNING, new=True) as file,
        ):
            file.write(secrets.token_hex(_TOKEN_BYTES))

    def give_back(self, session: Session) -> None:
        """Leave what this one has inherited to the one before, for the next to have."""
        before = [folder for folder in self.root.glob(f"{_PREFIX}*") if folder != session.folder]
        if before:
            session.results.rename(Session(max(before)).results)

    def _folder(self, services: Sequence[str]) -> Path:
        name = f"{_PREFIX}{time.strftime('%Y%m%d_%H%M%S')}"
        for candidate in _names(name):
            with contextlib.suppress(FileExistsError):
                folder = self.root / candidate
                folder.mkdir(mode=0o700)
                break
        for service in services:
            (folder / "logs" / service).mkdir(parents=True)
        self._inherit(Session(folder))
        with _private(folder / "token") as token:
            token.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
        return folder


@dataclass(frozen=True)
class Own(Session):
    """This process's session, of which it holds the lock."""

    root: Path
    lock: int
    stale: Session | None
    """The one before, whose server ended without a word."""

    def publish(self, record: Record) -> None:
        """Write down what it is, and make it the current one: from now on others find it."""
        part = self.folder / ".config.json"
        with _private(part) as file:
            json.dump(asdict(record), file, indent=2)
        part.replace(self.folder / "config.json")
        link = self.root / f".{_CURRENT}-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.folder.name)
        link.replace(self.root / _CURRENT)

    def end(self) -> None:
        """What is left is its record and its log."""
        Sessions(self.root).forget(self)
        os.close(self.lock)

    def discard(self) -> None:
        """As if it had never begun."""
        sessions = Sessions(self.root)
        sessions.forget(self)
        sessions.give_back(self)
        rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def _names(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1


def _private(path: Path, *, new: bool = False) -> Any:
    how = os.O_EXCL if new else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600), "w")
