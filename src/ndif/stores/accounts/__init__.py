"""Accounts: who may do what. All clients alike, a local server's owner, or the users who have keys."""

from __future__ import annotations

from ndif.config.settings import Settings
from ndif.stores.accounts.file import FileAccounts as FileAccounts
from ndif.stores.accounts.guesses import TooManyGuessesError as TooManyGuessesError
from ndif.stores.accounts.keyless import OpenAccounts as OpenAccounts
from ndif.stores.accounts.keyless import OwnerAccounts as OwnerAccounts
from ndif.stores.accounts.port import Account as Account
from ndif.stores.accounts.port import Accounts as Accounts
from ndif.stores.accounts.port import Caller as Caller
from ndif.stores.accounts.port import KeysError as KeysError
from ndif.stores.accounts.port import NoSuchKeyError as NoSuchKeyError


def open_accounts(settings: Settings) -> Accounts:
    """Return the accounts of `NDIF_API_KEYS`, or those that need no key."""
    if settings.api_keys is None:
        return OpenAccounts(hotswapping=settings.hotswapping)
    return FileAccounts(settings.api_keys.expanduser())


def may_trust(settings: Settings) -> bool:
    """Return True if the code of some user may run unconfined, as far as this machine knows."""
    if settings.broker_url:  # gateways elsewhere have the keys
        return True
    if settings.api_keys is None:
        return False
    try:
        return FileAccounts(settings.api_keys.expanduser()).trusts_any
    except KeysError:
        return True
