"""Accounts: the rights of all clients alike, of a local server's owner, or of users with keys."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

from ndif.config.settings import Settings
from ndif.stores.accounts.anonymous_accounts import OpenAccounts as OpenAccounts
from ndif.stores.accounts.anonymous_accounts import OwnerAccounts as OwnerAccounts
from ndif.stores.accounts.choice import contradiction as contradiction
from ndif.stores.accounts.choice import database_url as database_url
from ndif.stores.accounts.choice import default_file as default_file
from ndif.stores.accounts.choice import set_variables as set_variables
from ndif.stores.accounts.file import FileAccounts as FileAccounts
from ndif.stores.accounts.file import read_keys as read_keys
from ndif.stores.accounts.guesses import TooManyGuessesError as TooManyGuessesError
from ndif.stores.accounts.port import Account as Account
from ndif.stores.accounts.port import Accounts as Accounts
from ndif.stores.accounts.port import AccountsUnavailableError as AccountsUnavailableError
from ndif.stores.accounts.port import Caller as Caller
from ndif.stores.accounts.port import ImportedKey as ImportedKey
from ndif.stores.accounts.port import KeysError as KeysError
from ndif.stores.accounts.port import NoSuchKeyError as NoSuchKeyError
from ndif.stores.accounts.port import NotInRegistryError as NotInRegistryError
from ndif.stores.accounts.port import Registry as Registry
from ndif.stores.accounts.port import RegistryError as RegistryError
from ndif.stores.accounts.port import digest_of as digest_of
from ndif.stores.accounts.port import new_key as new_key
from ndif.stores.accounts.port import tier_with as tier_with
from ndif.stores.accounts.prober import PROBER as PROBER
from ndif.stores.accounts.prober import AccountsWithProber as AccountsWithProber
from ndif.stores.accounts.prober import probe_key_of as probe_key_of

if TYPE_CHECKING:
    from ndif.stores.accounts.sql.database import Database


def open_accounts(settings: Settings) -> Accounts:
    """Return the accounts in the configured database or file, or else accounts without keys."""
    if (database := open_database(settings)) is not None:
        from ndif.stores.accounts.sql.accounts import SqlAccounts

        return SqlAccounts(database, settings.accounts_cache_s)
    if settings.api_keys is not None:
        return FileAccounts(settings.api_keys.expanduser())
    return OpenAccounts(hotswapping=settings.hotswapping)


def open_database(settings: Settings) -> Database | None:
    """Return the configured database of keys; None for another form of accounts."""
    url = database_url(settings)
    if url is None:
        return None
    # A local server has no use for SQLAlchemy, which takes a while to import.
    from ndif.stores.accounts.sql.database import Database

    return Database(url)


def may_trust(settings: Settings) -> bool:
    """Return True if the code of some user may run unconfined, or this machine cannot rule it out."""
    if settings.broker_url:  # gateways on other machines have the keys
        return True
    if (url := database_url(settings)) is not None:
        return _database_trusts(url)
    if settings.api_keys is None:
        return False
    try:
        return FileAccounts(settings.api_keys.expanduser()).trusts_any
    except KeysError:
        return True


def _database_trusts(url: str) -> bool:
    """Return False only for a SQLite file that is missing or has no trusted tier; it is read at once."""
    scheme, _, path = url.partition(":///")
    if not scheme.startswith("sqlite"):
        return True
    file = Path(path.partition("?")[0]).absolute()
    if not file.exists():
        return False
    try:
        with contextlib.closing(
            sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)
        ) as connection:
            query = "SELECT 1 FROM ndif_tiers WHERE trusted LIMIT 1"
            return connection.execute(query).fetchone() is not None
    except sqlite3.Error:
        return True
