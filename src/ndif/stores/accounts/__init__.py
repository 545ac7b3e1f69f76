"""Accounts: who may do what. All clients alike, or the users of a file of keys."""

from __future__ import annotations

from ndif.config.settings import Settings
from ndif.stores.accounts.file import FileAccounts, KeysError
from ndif.stores.accounts.port import Account, Accounts, NoSuchKeyError, OpenAccounts


def open_accounts(settings: Settings) -> Accounts:
    """Return the accounts of `NDIF_API_KEYS`, or those that need no key.

    Raises:
        KeysError: if the file of keys cannot be used.
    """
    if settings.api_keys is None:
        return OpenAccounts(hotswapping=settings.hotswapping)
    return FileAccounts(settings.api_keys.expanduser())


__all__ = [
    "Account",
    "Accounts",
    "FileAccounts",
    "KeysError",
    "NoSuchKeyError",
    "OpenAccounts",
    "open_accounts",
]
