"""Accounts: who may do what. Embedded forms: everybody alike, or a file of keys."""

from ndif.stores.accounts.choice import open_accounts
from ndif.stores.accounts.file import FileAccounts, KeysError
from ndif.stores.accounts.open import OpenAccounts
from ndif.stores.accounts.port import Account, Accounts, NoSuchKeyError

__all__ = [
    "Account",
    "Accounts",
    "FileAccounts",
    "KeysError",
    "NoSuchKeyError",
    "OpenAccounts",
    "open_accounts",
]
