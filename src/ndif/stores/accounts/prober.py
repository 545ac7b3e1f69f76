"""The account of the server's own probes, beside the accounts of its users."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from ndif.stores.accounts.port import (
    Account,
    Accounts,
    Caller,
    Registry,
    digest_of,
    runner_key_of,
)

PROBER = "ndif probe"
"""Name under which probes take turns with users."""


def probe_key_of(secret: str) -> str:
    """Return the API key of probes, given the operator's token or a secret of the cluster.

    Whoever has the secret can make it: `ndif probe` on the server's machine, and the process that leads.
    Nothing stores it, and it does not lead back to the secret. It lets jobs be run and nothing else: it
    loads no model on demand, its jobs are confined as a stranger's, and no route of the operator takes it.
    """
    return f"ndif_{hmac.new(secret.encode(), b'ndif probe', hashlib.sha256).hexdigest()}"


@dataclass(frozen=True)
class AccountsWithProber:
    """The form of `Accounts` that knows the keys of probes, and asks another form of all others."""

    users: Accounts
    keys: tuple[str, ...] = field(repr=False)
    """`probe_key_of` the operator's token, and of the secrets that hosts of one server share."""

    @property
    def registry(self) -> Registry | None:
        return self.users.registry

    async def start(self) -> None:
        await self.users.start()

    async def stop(self) -> None:
        await self.users.stop()

    async def ping(self) -> None:
        await self.users.ping()

    async def account(self, caller: Caller) -> Account:
        given = caller.key.encode(errors="replace")
        if any(secrets.compare_digest(given, key.encode()) for key in self.keys):
            return Account(PROBER, key=runner_key_of(digest_of(caller.key)))
        return await self.users.account(caller)
