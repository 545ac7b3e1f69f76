"""Everybody may use the server, and everybody alike."""

from __future__ import annotations

from ndif.stores.accounts.port import Account, user_of


class OpenAccounts:
    """The form of `Accounts` that asks nobody for a key."""

    def __init__(self, *, hotswapping: bool, trusted: bool = False) -> None:
        self._hotswapping = hotswapping
        self._trusted = trusted

    async def account(self, key: str, host: str) -> Account:
        """See `Accounts.account`."""
        return Account(user_of(key, host), hotswapping=self._hotswapping, trusted=self._trusted)
