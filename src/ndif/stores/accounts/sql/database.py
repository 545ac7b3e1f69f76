"""The database of accounts: connections, transactions, migrations, and the owner of its tables."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from ndif.distribution import install_command
from ndif.stores.accounts.port import AccountsUnavailableError, KeysError
from ndif.stores.accounts.sql.tables import FOREIGN, KEYS, VERSION_TABLE

logger = logging.getLogger(__name__)

OLDEST_POSTGRES = (13,)

_TIMEOUT_S = 5
"""Maximum seconds for a connection and for a statement."""
_POOL = 8
"""Maximum connections of a process."""
_MIGRATING = 0x6E646966
"""Number of the advisory lock that a migration of PostgreSQL holds."""
_DRIVERS = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
_DRIVERS["sqlite"] = "sqlite+aiosqlite"

Shape = Literal["ours", "foreign", "empty"]
"""Owner of the tables in a database: this server; another NDIF server (`foreign.py`); nobody."""


class Database:
    """A SQLite file or a PostgreSQL database, connected on first use.

    Failures to answer raise an `AccountsUnavailableError`.
    """

    def __init__(self, url: str) -> None:
        """Create the engine; raise a `KeysError` if `url` is invalid or its driver is missing."""
        self._url = _with_driver(url)
        self.is_sqlite = self._url.get_backend_name() == "sqlite"
        self._file = Path(self._url.database or "")
        place = f"{self._url.host}:{self._url.port or 5432}/{self._url.database}"
        self.name = str(self._file) if self.is_sqlite else place
        """Place of the database, for messages."""
        options = {"timeout": _TIMEOUT_S}
        if not self.is_sqlite:
            options["command_timeout"] = _TIMEOUT_S
        try:
            self._engine = create_async_engine(
                self._url,
                connect_args=options,
                pool_size=_POOL,
                max_overflow=0,
                pool_timeout=_TIMEOUT_S,
                pool_pre_ping=True,
            )
        except (ImportError, NoSuchModuleError) as error:
            raise KeysError(
                f"API keys in PostgreSQL need asyncpg ({error}): run `{install_command('asyncpg')}`."
            ) from error
        if self.is_sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a transaction that must not write."""
        if self.is_sqlite and not self._file.exists():  # SQLite would create it
            raise AccountsUnavailableError(f"{self._file} is not there")
        async with _translated(), self._engine.begin() as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a transaction, which is committed unless an error is raised."""
        if self.is_sqlite:
            _create_private(self._file)
        engine = self._engine.execution_options(writes=True)
        async with _translated(), engine.begin() as connection:
            yield connection

    async def migrate(self) -> None:
        """Migrate the schema to this version; a concurrent migration waits, and has nothing left to do."""
        # Imported here, because these take half of the import time of a start.
        from alembic import command
        from alembic.util import CommandError

        async with self.writing() as connection:
            if not self.is_sqlite:  # in SQLite, a writing transaction excludes others anyway
                await connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATING})"))
            try:
                await connection.run_sync(
                    lambda sync_connection: command.upgrade(_alembic(sync_connection), "head")
                )
            except CommandError as error:
                raise KeysError(
                    f"The database of API keys ({self.name}) was made by another version of ndif: {error}."
                ) from error

    async def shape(self) -> Shape:
        """Return the owner of the database's tables."""
        if self.is_sqlite and not self._file.exists():
            return "empty"
        async with self.reading() as connection:
            return await connection.run_sync(_shape)

    async def has_foreign(self) -> bool:
        """Return True if the database has another NDIF server's tables, maybe beside this server's."""
        if self.is_sqlite and not self._file.exists():
            return False
        async with self.reading() as connection:
            return await connection.run_sync(_has_foreign)

    async def check(self) -> Shape:
        """Return the owner of the database's tables; raise a `KeysError` if it cannot be used."""
        try:
            shape = await self.shape()
            if not self.is_sqlite:
                async with self.reading() as connection:
                    version = connection.dialect.server_version_info or ()
                    if version < OLDEST_POSTGRES:
                        raise KeysError(
                            f"The database of API keys ({self.name}) is PostgreSQL "
                            f"{'.'.join(map(str, version))}: it must be {OLDEST_POSTGRES[0]} or newer."
                        )
        except AccountsUnavailableError as error:
            raise KeysError(
                f"The database of API keys ({self.name}) cannot be used: {error}."
            ) from error
        return shape

    async def check_and_close(self) -> Shape:
        """Return the result of `check`, and close every connection."""
        try:
            return await self.check()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()


def _with_driver(url: str) -> URL:
    """Return an address with the driver that this server uses."""
    if url.startswith("sqlite:///"):  # a plain path, in which nothing is quoted
        path = url.removeprefix("sqlite:///").partition("?")[0]
        return _sqlite_url(path)
    try:
        address = make_url(url)
        driver = _DRIVERS[address.drivername.partition("+")[0]]
    except (ArgumentError, KeyError, ValueError) as error:
        raise KeysError(
            "The address of the database of API keys (NDIF_DATABASE_URL) is not like "
            "postgresql://USER:PASSWORD@HOST/DATABASE or sqlite:////FOLDER/accounts.sqlite."
        ) from error
    if driver == _DRIVERS["sqlite"]:
        return _sqlite_url(address.database)
    query = dict(address.query)
    if "sslmode" in query:  # libpq's name for it
        query["ssl"] = query.pop("sslmode")
    return address.set(drivername=driver, query=query)


def _sqlite_url(path: str | None) -> URL:
    if path in (None, "", ":memory:"):
        raise KeysError(
            "The address of the database of API keys (NDIF_DATABASE_URL) names no file: keys must outlive "
            "the server."
        )
    return URL.create(_DRIVERS["sqlite"], database=path)


def _prepare_sqlite(connection: Any, _: object) -> None:
    # `_begin_sqlite` begins transactions, because sqlite3's own leave out changes of the schema.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode = WAL", "foreign_keys = ON", f"busy_timeout = {_TIMEOUT_S}000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # Writers wait here: a transaction that reads first and writes later fails if another wrote in between.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _create_private(file: Path) -> None:
    """Create a file that only its owner can read, if it does not exist."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
    except OSError as error:
        raise AccountsUnavailableError(f"{file} cannot be written: {error.strerror}") from error


def _alembic(connection: Connection) -> Any:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    return config


def _shape(connection: Connection) -> Shape:
    inspector = inspect(connection)
    if inspector.has_table(KEYS.name) and inspector.has_table(VERSION_TABLE):
        return "ours"
    return "foreign" if _has_foreign(connection) else "empty"


def _has_foreign(connection: Connection) -> bool:
    inspector = inspect(connection)
    return all(map(inspector.has_table, FOREIGN)) and any(
        column["name"] == "key_id" for column in inspector.get_columns("keys")
    )


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """Turn every error of a database or its driver into an `AccountsUnavailableError`."""
    try:
        yield
    except IntegrityError:
        raise
    except (SQLAlchemyError, OSError, asyncio.TimeoutError) as error:
        raise AccountsUnavailableError(_reason(error)) from error
    except Exception as error:
        # asyncpg's own errors, which SQLAlchemy does not translate while it connects.
        if type(error).__module__.partition(".")[0] == "asyncpg":
            raise AccountsUnavailableError(_reason(error)) from error
        raise


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without the statement and its values."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).splitlines()
    return lines[0].rpartition(">: ")[2] if lines else type(cause).__name__
