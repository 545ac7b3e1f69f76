"""SQLite files of a server of one process: opened by that process alone, durable, replaced if damaged."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path

from ndif.stores.disk import FULL

logger = logging.getLogger(__name__)

_LOCK_S = 0.5


def open_database(path: Path, schema: str, table: str) -> sqlite3.Connection:
    """Open the file at `path`, a new one if it is damaged, and create what `schema` says.

    A file whose `table` is empty gives its room back. No second process can open the file meanwhile.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    try:
        return _connected(path, schema, table)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        logger.error("%s is damaged (%s) and is put aside as %s", path, error, aside.name)  # noqa: TRY400
        path.rename(aside)
        path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
        return open_database(path, schema, table)


def disk_reason(error: sqlite3.Error) -> str:
    """Return the clause that says why a file takes or gives nothing."""
    return FULL if "full" in str(error) else f"the server's disk failed ({error})"


def _connected(path: Path, schema: str, table: str) -> sqlite3.Connection:
    # Its holder may be about to end.
    connection = sqlite3.connect(path, timeout=_LOCK_S, check_same_thread=False)
    try:
        for setting in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {setting}")
        with connection:
            connection.executescript(schema)
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        if not connection.execute(f"SELECT 1 FROM {table}").fetchone():  # noqa: S608 - a constant
            with contextlib.suppress(sqlite3.OperationalError):  # a full disk
                connection.execute("VACUUM")
    except sqlite3.Error:
        connection.close()
        raise
    return connection
