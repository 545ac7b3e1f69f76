"""The check of an API key, the same for every form of `Accounts` that has keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from abc import ABC, abstractmethod

from ndif.stores.accounts.guesses import Guesses
from ndif.stores.accounts.port import Account, Caller, NoSuchKeyError, digest_of

_BLIND_BYTES = 16
_LOCKS = 256


class KeyedAccounts(ABC):
    """Accounts whose users have keys: guesses are limited, and keys are found by their digests.

    A subclass implements `_find`. The keys of one address are looked up one at a time, so that concurrent
    guesses are counted one by one; a key that the address has used before does not wait.
    """

    def __init__(self) -> None:
        self._blind = secrets.token_bytes(_BLIND_BYTES)
        self._guesses = Guesses()
        # Addresses that share a lock wait for each other's look-ups.
        self._locks = [asyncio.Lock() for _ in range(_LOCKS)]

    @abstractmethod
    async def _find(self, digest: str) -> Account | None:
        """Return the account of the key with this digest; None if there is none.

        Raise a `NoSuchKeyError` for a revoked or expired key: it does not count as a guess.
        """

    async def account(self, caller: Caller) -> Account:
        """See `Accounts.account`. Raise a `TooManyGuessesError` for an address that keeps guessing."""
        if not caller.key:
            raise NoSuchKeyError(
                "This server wants an API key: set one with nnsight.CONFIG.set_default_api_key(…), or ask "
                "its operator for one."
            )
        digest = digest_of(caller.key)
        if self._guesses.is_proven(caller.name, self._blinded(digest)):
            return await self._account(caller, digest)
        async with self._locks[hash(caller.name) % _LOCKS]:
            return await self._account(caller, digest)

    async def _account(self, caller: Caller, digest: str) -> Account:
        blinded = self._blinded(digest)
        self._guesses.check(caller.name, blinded, time.monotonic())
        account = await self._find(digest)
        self._guesses.record(caller.name, blinded, time.monotonic(), is_right=account is not None)
        if account is None:
            raise NoSuchKeyError("This server does not know the API key. Ask its operator for one.")
        return account

    def _blinded(self, digest: str) -> str:
        """Return a keyed hash of a digest, so that the time of its comparison reveals nothing of a key."""
        return hmac.new(self._blind, digest.encode(), hashlib.sha256).hexdigest()
