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
"""User name of probes in fair scheduling."""


def probe_key_of(secret: str) -> str:
    """Derive the API key of probes from the operator's token or a secret of the cluster.

    Any holder of the secret can derive it: `ndif probe` on the server's machine, and the leader. It is not
    stored, and does not reveal the secret. It only allows jobs: it loads no model on demand, its jobs are
    confined, and no operator route accepts it.
    """
    return f"ndif_{hmac.new(secret.encode(), b'ndif probe', hashlib.sha256).hexdigest()}"


@dataclass(frozen=True)
class AccountsWithProber:
    """The form of `Accounts` that recognises the keys of probes, and delegates all others to `users`."""

    users: Accounts
    keys: tuple[str, ...] = field(repr=False)
    """`probe_key_of` of the operator's token and of the cluster's secrets."""

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
        key_bytes = caller.key.encode(errors="replace")
        if any(secrets.compare_digest(key_bytes, key.encode()) for key in self.keys):
            return Account(PROBER, key=runner_key_of(digest_of(caller.key)))
        return await self.users.account(caller)
