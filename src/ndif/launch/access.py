"""Accounts at the start of a server: their checks, the first API key, and the file for clients."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ndif.config.groups import AccountSettings
from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.net import StartError, reachable_as
from ndif.stores.accounts import (
    AccountsUnavailableError,
    FileAccounts,
    ImportedKey,
    KeysError,
    RegistryError,
    contradiction,
    default_file,
    digest_of,
    new_key,
    open_accounts,
    open_database,
    set_variables,
    tier_with,
)
from ndif.stores.disk import open_private

_CLIENT_LINES = "client.env"
_KEY_LINE = re.compile(r"^export NDIF_API_KEY=(\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ClientLines:
    """The file of shell lines that a client needs, and its API key if this start made the key."""

    file: Path
    first_key: str | None


def access_problems(options: Settings) -> Iterator[str]:
    """Yield the reason why the configured accounts cannot be used, if there is one."""
    if (sentence := contradiction(options)) is not None:
        yield sentence
        return
    try:
        if options.api_keys is not None:
            FileAccounts(options.api_keys.expanduser())
        else:
            describe_keys(options)
    except KeysError as error:
        yield f"The API keys cannot be used: {error}"


def exposure_problem(options: AccountSettings, host: str) -> str | None:
    """Return an error if dev mode would admit other machines without a key, else None."""
    if not options.dev_mode or reachable_as(host, "") is None:
        return None
    return (
        f"{name_of('dev_mode')}=true admits everybody who reaches {host}, without an API key. Unset it, "
        "or pass --insecure."
    )


def access_warning(options: AccountSettings) -> str | None:
    """Return a warning if other users of the machine can read or change the file of keys, else None."""
    if options.api_keys is None:
        return None
    try:
        return FileAccounts(options.api_keys.expanduser()).warning
    except KeysError:
        return None  # `access_problems` reports it


def describe_keys(options: Settings) -> str | None:
    """Return the place of the keys; None if no key is needed. Raise a `KeysError` if it is unusable."""
    if options.api_keys is not None:
        return str(options.api_keys)
    if not set_variables(options) and not default_file(options).exists():
        return str(default_file(options))
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


def prepare_access(options: Settings, url: str) -> ClientLines | None:
    """Migrate the database of keys, if there is one; raise a `StartError` if it cannot be used.

    A database that no variable names gets a first key if it has none, and a file with the lines for clients
    of the server at `url`. A database of another NDIF server stays as it is.
    """
    try:
        first_key = asyncio.run(_prepare(options))
    except (AccountsUnavailableError, KeysError, RegistryError) as error:
        raise StartError(f"The database of API keys cannot be used: {error}") from error
    file = options.root / _CLIENT_LINES
    try:
        is_written = not set_variables(options) and _write_lines(file, url, first_key)
    except OSError as error:
        raise StartError(f"{file} cannot be written: {error.strerror}.") from error
    return ClientLines(file, first_key) if is_written else None


async def _prepare(options: Settings) -> str | None:
    database = open_database(options)
    if database is None:
        return None
    try:
        if await database.shape() != "foreign":
            await database.migrate()
    finally:
        await database.close()
    return None if set_variables(options) else await _first_key(options)


async def _first_key(options: Settings) -> str | None:
    """Create and return a key for the user who starts the server; None if the database has keys."""
    accounts = open_accounts(options)
    registry = accounts.registry
    try:
        if registry is None or await registry.keys():
            return None
        key = new_key()
        # Two tiers, so that an operator can give others the first right without the second.
        tiers = [tier_with([right], right) for right in ("hotswapping", "gated")]
        first = ImportedKey(digest_of(key), _own_name(), tiers, "made by the first start")
        await registry.import_keys([first])
        return key
    finally:
        await accounts.stop()


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user may have no name
        return f"uid {os.geteuid()}"


def _write_lines(file: Path, url: str, key: str | None) -> bool:
    """Write a client's lines with `key` or an earlier start's key; return False if neither exists."""
    if key is None:
        try:
            match = _KEY_LINE.search(file.read_text())
        except OSError:
            return False
        if match is None:
            return False
        key = match[1]
    with open_private(file) as lines:
        lines.write(f"export NDIF_HOST={url}\nexport NDIF_API_KEY={key}\n")
    return True
