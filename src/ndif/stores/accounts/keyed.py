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
    """Accounts whose users have keys: guessing is slowed, and a key is found by its digest.

    A form says where keys are (`_find`). It is asked for the keys of an address one at a time, unless the
    address has used the key before: guesses that are sent at once are counted one by one.
    """

    def __init__(self) -> None:
        self._blind = secrets.token_bytes(_BLIND_BYTES)
        self._guesses = Guesses()
        # Addresses that share one wait for each other for as long as a look-up takes.
        self._locks = [asyncio.Lock() for _ in range(_LOCKS)]

    @abstractmethod
    async def _find(self, digest: str) -> Account | None:
        """Return the account of the key with this digest; None if there is none.

        Raise a `NoSuchKeyError` of its own for a key that was one: that is no guess.
        """

    async def account(self, caller: Caller) -> Account:
        """See `Accounts.account`. An address that keeps on guessing gets a `TooManyGuessesError`."""
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
        self._guesses.note(caller.name, blinded, time.monotonic(), is_right=account is not None)
        if account is None:
            raise NoSuchKeyError("This server does not know the API key. Ask its operator for one.")
        return account

    def _blinded(self, digest: str) -> str:
        """Return what the time of a comparison may tell of: nobody outside can choose or foresee it."""
        return hmac.new(self._blind, digest.encode(), hashlib.sha256).hexdigest()
