"""The interface of a store of results, terminal responses and large payloads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ndif.schema.payload import ZSTD_MAGIC, Payload, PayloadFile
from ndif.stores.objects.result_quota import ResultQuota, ResultQuotaLimits, StoredObject


class ObjectStoreError(Exception):
    """The store cannot be reached, or refuses; the message is a sentence for the operator."""


class DiskError(ObjectStoreError):
    """The server's own disk is full or fails; the message is a clause that a user may read."""


class MemoryFullError(ObjectStoreError):
    """This machine has no memory for a result; the message is a clause that a user may read."""


class Upload(Protocol):
    """A new object without a key: a file descriptor that a runner writes to."""

    def fileno(self) -> int:
        """Return a descriptor, open for writing, that may be handed to another process."""

    def seal(self) -> bool:
        """End the writing; return True if no other process can write any more either."""

    async def commit(self, key: str) -> int:
        """Store the written bytes as the object `key`, and return their number."""

    def discard(self) -> None:
        """Drop the written bytes. Does nothing after a commit."""


class ObjectStore(Protocol):
    """Objects by key. All objects expire, except in `hub/`.

    - `results/{id}.pt`: a result;
    - `owners/{id}.{digest}`: the user of a result;
    - `responses/{id}.json`: a polled job's last update;
    - `ends/{id}.json`: a polled job's terminal response;
    - `requests/{id}`: a payload that is too large for the queue;
    - `hub/{digest}.zip`: a model's files.

    `put`, `get`, `delete` and `Upload.commit` raise `ObjectStoreError` if the store stays unreachable.
    """

    ttl_s: float
    """Seconds after which results expire."""
    response_ttl_s: float
    """Seconds after which responses expire."""
    limits: ResultQuotaLimits
    room: ResultQuota
    """Quota that admits results within the limits."""
    folder: Path
    """Local folder of the objects, or of payloads on their way to the store."""

    async def start(self) -> None:
        """Start to delete expired objects."""

    async def stop(self) -> None:
        """Stop deleting expired objects."""

    async def ping(self) -> None:
        """Raise an `ObjectStoreError` if the store does not answer now."""

    def create(self) -> Upload:
        """Return a new object without a key."""

    async def create_for(self, size: int) -> Upload:
        """Return a new object for about `size` bytes, once there is room to write them.

        A store that buffers in memory raises a `MemoryFullError` if there is no room for long.
        """

    def create_payload(self) -> PayloadFile:
        """Return an empty local file, which `put_payload` stores without a copy where possible."""

    async def put_payload(self, key: str, payload: Payload) -> None:
        """Store a payload as `key`. Its file, if it has one, stays where it is."""

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        """Store `content` as `key` in one atomic step.

        With `soon`, give up early on an unreachable store, because a late write is useless.
        """

    async def get(self, key: str) -> bytes | None:
        """Return the content of `key`, or None if there is no such object."""

    async def delete(self, key: str) -> None:
        """Delete the object `key`, if there is one."""

    async def unexpired(self, folder: str) -> Mapping[str, StoredObject]:
        """Delete the expired objects of a folder, and return the others by name."""

    async def sweep(self, *, dry: bool = False) -> Mapping[str, int]:
        """Delete expired objects; return their number by folder. With `dry`, only count them."""

    def problem(self) -> str | None:
        """Return a sentence if the store is known to be nearly full, else None."""

    async def settle(self, *keys: str) -> None:
        """Return once these objects, if they exist, would survive a loss of power."""

    def url(self, key: str, base_url: str, *, once: bool = False) -> str:
        """Return a signed URL of `key` that expires with it.

        With `once`, the client fetches the URL one time, and the store may delete the object soon after.
        """


def update_key(request_id: str) -> str:
    """Return the key of a polled job's last update."""
    return f"responses/{request_id}.json"


def end_key(request_id: str) -> str:
    """Return the key of a polled job's terminal response."""
    return f"ends/{request_id}.json"


def result_key(request_id: str) -> str:
    """Return the key of a job's result."""
    return f"results/{request_id}.pt"


def file_name(key: str, beginning: bytes) -> str:
    """Return the name under which a browser saves a result, given the result's first bytes."""
    name = key.rpartition("/")[2]
    return f"{name}.zst" if beginning.startswith(ZSTD_MAGIC) else name


SWEPT = ("results", "responses", "ends", "requests", "owners")
"""Folders whose objects expire. Objects in `hub` are named after their content and are kept."""
_KEY = re.compile(rf"({'|'.join((*SWEPT, 'hub'))})/[A-Za-z0-9_-][A-Za-z0-9._-]{{0,127}}")
_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OURS = re.compile(
    rf"results/{_UUID}\.pt|(responses|ends)/{_UUID}\.json|requests/{_UUID}|owners/{_UUID}\.[0-9a-f]{{16}}"
)
_REQUEST_S = 86_400.0
"""Minimum lifetime of a payload, which may wait longer than results live; its claimer deletes it."""


def is_key(key: str) -> bool:
    """Return True if `key` is a valid key."""
    return _KEY.fullmatch(key) is not None


def is_ours(key: str) -> bool:
    """Return True if a sweep may delete `key`; the store may also hold objects of its owner."""
    return _OURS.fullmatch(key) is not None


def lifetime_s(folder: str, store: ObjectStore) -> float:
    """Return the seconds after which objects of a folder expire."""
    if folder in ("responses", "ends"):
        return store.response_ttl_s
    return max(store.ttl_s, _REQUEST_S) if folder == "requests" else store.ttl_s


def check(key: str) -> None:
    """Raise a `ValueError` unless `key` is a valid key."""
    if not is_key(key):
        raise ValueError(f"{key[:100]!r} is not the key of an object")
