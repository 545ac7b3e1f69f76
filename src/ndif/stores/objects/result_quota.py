"""The quota of stored results: limits on all results together, and on the results of one user."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ndif.sizes import format_size

_RECOUNT_S = 10.0
"""Seconds after which results are counted again, since other processes store and delete them too."""
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class ResultQuotaLimits:
    """Limits of the bytes of stored results; by default there are none."""

    all_bytes: float = float("inf")
    share: float = 1.0
    """Fraction of `all_bytes` that the results of one user may take."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a listing."""

    size: int
    age_s: float


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes of stored results."""

    total: int = 0
    by_user: Mapping[str, int] = field(default_factory=dict)
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    """Age in seconds of each user's oldest result; under "", of the oldest result of all users."""

    @classmethod
    def of(
        cls, results: Mapping[str, StoredObject], owners: Mapping[str, StoredObject]
    ) -> StoredBytes:
        """Add up listings of results (`ID.pt`) and of their owners (`ID.OWNER`)."""
        owner_of = dict(name.split(".", 1) for name in owners)
        by_user: dict[str, int] = {}
        oldest: dict[str, float] = {}
        for name, result in results.items():
            owner = owner_of.get(name.removesuffix(".pt"), "")
            by_user[owner] = by_user.get(owner, 0) + result.size
            for key in {owner, ""}:
                oldest[key] = max(oldest.get(key, 0.0), result.age_s)
        return cls(sum(by_user.values()), by_user, oldest)

    def plus(self, owner: str, size: int) -> StoredBytes:
        """Return this usage with one more result."""
        mine = self.by_user.get(owner, 0) + size
        return StoredBytes(self.total + size, {**self.by_user, owner: mine}, self.oldest_s)


def refusal(
    usage: StoredBytes,
    owner: str,
    size: int,
    limits: ResultQuotaLimits,
    ttl_s: float,
    own: int | None = None,
) -> str | None:
    """Return a sentence for the user if there is no room for a result, else None.

    `own` is a further limit on the bytes of the user's results.
    """
    mine, share = usage.by_user.get(owner, 0), int(min(limits.all_bytes * limits.share, 1 << 62))
    if own is not None and mine + size > own:
        taken, whose, rule = mine, "your stored results", f"{format_size(own)}, which is your limit"
    elif mine + size > share:
        taken, whose = mine, "your stored results"
        rule = f"{format_size(share)}, which is each user's limit (NDIF_MAX_STORED_SHARE)"
    elif usage.total + size > limits.all_bytes:
        taken, whose, owner = usage.total, "the stored results of all users", ""
        rule = f"{format_size(limits.all_bytes)} together (NDIF_MAX_STORED_BYTES)"
    else:
        return None
    left_s = ttl_s - usage.oldest_s.get(owner, 0.0)
    when = (
        f" The oldest of them is deleted in {max(1, round(left_s / _MINUTE_S))} min."
        if taken
        else ""
    )
    return (
        f"The result takes {format_size(size)} and was not stored: {whose} take {format_size(taken)}, of "
        f"at most {rule}.{when} Save fewer values, reduce them inside the trace, or wait for results with "
        "blocking=True, which are deleted once they are fetched."
    )


class _Store(Protocol):
    ttl_s: float
    limits: ResultQuotaLimits

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None: ...

    async def unexpired(self, folder: str) -> Mapping[str, StoredObject]: ...


class ResultQuota:
    """The quota of one store, as this process knows it.

    Owns the count of stored results, and the admitted results that are not stored yet. The count comes from
    a listing of the store, so it outlives this process. An empty object beside each result names its owner.
    The store deletes expired objects.
    """

    def __init__(self, store: _Store) -> None:
        self._store = store
        self._counted = StoredBytes()
        self._counted_at = float("-inf")
        self._admitted: dict[str, tuple[str, int]] = {}
        self._counting = asyncio.Lock()

    async def admit(
        self, request_id: str, user: str, size: int, own: int | None = None
    ) -> str | None:
        """Reserve room for a result and return None; else return a sentence as `refusal` does."""
        owner = hashlib.blake2b(user.encode(), digest_size=8).hexdigest()
        # Written first: a write waits for an unavailable store, while a listing gives up, and a result
        # should not be lost because of a recount. The owner of a refused result expires like the others.
        await self._store.put(f"owners/{request_id}.{owner}", b"")
        async with self._counting:
            if time.monotonic() - self._counted_at > _RECOUNT_S:
                await self._count()
            reason = self._refusal(owner, size, own)
            if reason is not None:
                # Since the last count, results may have expired, or been fetched and deleted.
                await self._count()
                reason = self._refusal(owner, size, own)
            if reason is None:
                self._admitted[request_id] = owner, size
            return reason

    def settle(self, request_id: str, *, stored: bool) -> None:
        """Count an admitted result as stored, or free its room."""
        owner, size = self._admitted.pop(request_id, ("", 0))
        if stored and size:
            self._counted = self._counted.plus(owner, size)

    def _refusal(self, owner: str, size: int, own: int | None) -> str | None:
        usage = self._counted
        for reservation in self._admitted.values():
            usage = usage.plus(*reservation)
        return refusal(usage, owner, size, self._store.limits, self._store.ttl_s, own)

    async def _count(self) -> None:
        results = await self._store.unexpired("results")
        owners = await self._store.unexpired("owners")
        self._counted, self._counted_at = StoredBytes.of(results, owners), time.monotonic()
