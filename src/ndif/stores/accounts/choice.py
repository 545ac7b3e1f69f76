"""Which form of `Accounts` a server has: its settings say where the keys are."""

from __future__ import annotations

from ndif.config import Settings
from ndif.stores.accounts.file import FileAccounts
from ndif.stores.accounts.open import OpenAccounts
from ndif.stores.accounts.port import Accounts


def open_accounts(settings: Settings) -> Accounts:
    """Those of the file of keys, or everybody alike.

    Raises:
        KeysError: if the file cannot be used.
    """
    if settings.api_keys is None:
        return OpenAccounts(hotswapping=settings.hotswapping)
    return FileAccounts(settings.api_keys.expanduser())
