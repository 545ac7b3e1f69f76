"""The forms of `Accounts` without API keys: all clients alike, or a local server's owner and its token."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ndif.stores.accounts.port import Account, Caller, NoSuchKeyError, WithoutStore

_ROOT = 0


@dataclass(frozen=True)
class OpenAccounts(WithoutStore):
    """The form of `Accounts` that needs no key: all users have the same privileges."""

    hotswapping: bool
    trusted: bool = False

    async def account(self, caller: Caller) -> Account:
        """See `Accounts.account`. Keys are ignored: a client that invents keys stays one user."""
        return Account(
            caller.name,
            hotswapping=self.hotswapping,
            trusted=self.trusted,
            gated=self.hotswapping,
        )


@dataclass(frozen=True)
class OwnerAccounts(WithoutStore):
    """The form of `Accounts` of a local server: its owner needs no token, everybody else does.

    Root, in a process of the same machine, counts as the owner.
    """

    owner: int
    """User id that runs the server."""
    token: str
    trusted: bool

    async def account(self, caller: Caller) -> Account:
        if caller.uid not in (self.owner, _ROOT) and not secrets.compare_digest(
            caller.key.encode(errors="replace"), self.token.encode()
        ):
            raise NoSuchKeyError(
                "This server runs the code of the user who started it, on the same machine, and of users "
                "who have its token. On your side run the line `export NDIF_API_KEY=…` that `ndif local "
                "start` printed, or ask the user who started it for that line."
            )
        return Account(caller.name, trusted=self.trusted)
