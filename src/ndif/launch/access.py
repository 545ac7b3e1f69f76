"""The accounts of a server that is to start: their checks, and what they need before it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from ndif.config.settings import Settings
from ndif.net import StartError
from ndif.stores.accounts import (
    AccountsAwayError,
    FileAccounts,
    KeysError,
    contradiction,
    open_database,
)


def access_problems(options: Settings) -> Iterator[str]:
    """Yield why the configured accounts cannot be used."""
    if (sentence := contradiction(options)) is not None:
        yield sentence
        return
    try:
        if options.api_keys is not None:
            FileAccounts(options.api_keys.expanduser())
        else:
            _check_database(options)
    except KeysError as error:
        yield f"The API keys cannot be used: {error}"


def access_warning(options: Settings) -> str | None:
    """Return the sentence that other users of the machine can read or change the keys; None if none can."""
    if options.api_keys is None:
        return None
    try:
        return FileAccounts(options.api_keys.expanduser()).warning
    except KeysError:
        return None  # a problem


def described_form(options: Settings) -> str | None:
    """Return who may use the server, in words; None if all who reach it may."""
    if options.api_keys is not None:
        return str(options.api_keys)
    database = open_database(options)
    if database is None:
        return None
    shape = asyncio.run(database.check_and_close())
    if shape == "foreign":
        return (
            f"{database.name}, the database of another NDIF server, which is only read; `ndif keys "
            "migrate` copies its keys"
        )
    return database.name


def prepare_access(options: Settings) -> None:
    """Bring the database of keys, if there is one, to this version's schema; a StartError says why not.

    A database of another NDIF server stays as it is.
    """
    database = open_database(options)
    if database is None:
        return

    async def prepare() -> None:
        try:
            if await database.shape() != "foreign":
                await database.migrate()
        finally:
            await database.close()

    try:
        asyncio.run(prepare())
    except (AccountsAwayError, KeysError) as error:
        raise StartError(f"The database of API keys cannot be used: {error}") from error


def _check_database(options: Settings) -> None:
    database = open_database(options)
    if database is not None:
        asyncio.run(database.check_and_close())
