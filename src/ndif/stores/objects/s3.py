"""Objects in a bucket of any server that speaks S3, fetched by clients from there."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import mmap
import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

# obstore, in Rust: uploads memory in parts without a copy, retries each, and signs for any host.
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store as Bucket

from ndif.stores.objects.keys import SWEPT, check, is_key, is_ours, lifetime_s
from ndif.stores.objects.port import ObjectStoreError
from ndif.stores.objects.s3_address import S3Address
from ndif.stores.objects.s3_errors import answered, no_bucket, sentence

logger = logging.getLogger(__name__)

_PART = 16 << 20
_PARTS_AT_ONCE = 4
_PATIENCE_S, _HURRIED_S = 60.0, 5.0
_BUCKET_S = 30.0
_LONGEST_SIGNATURE_S = 7 * 86_400
_SWEEPS_PER_LIFETIME = 10
_SWEEP_AT_LEAST_EVERY_S = 600.0
REPLACING_S = 0.1
"""What is not there is looked for once more: Swift has neither, for a moment, of what it replaces.

Of 2,839 polls beside 951 updates of the same response 4 found nothing.
"""
_CLOCK_S = 1.0
"""S3 tells times in whole seconds."""
_MADE, _THERE = 200, 409


class S3Upload:
    """Memory that a runner writes to."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._fd = os.memfd_create("result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # What is read as memory must not get shorter under the reader: that would end our process.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def fileno(self) -> int:
        """See `Upload.fileno`."""
        return self._fd

    async def commit(self, key: str) -> int:
        """See `Upload.commit`."""
        size = os.fstat(self._fd).st_size
        content = mmap.mmap(self._fd, size, prot=mmap.PROT_READ) if size else b""
        await self._store.write(key, content)
        self.discard()
        return size

    def discard(self) -> None:
        """See `Upload.discard`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class S3Store:
    """The form of `ObjectStore` that several machines share."""

    def __init__(
        self,
        address: S3Address,
        ttl_s: float,
        *,
        patience_s: float = _PATIENCE_S,
        hurried_s: float = _HURRIED_S,
    ) -> None:
        """How long a store that is away is tried again: `patience_s` to store something that must not be
        lost, `hurried_s` for all else.

        Raises:
            ObjectStoreError: if its file of authorities cannot be read, or holds none.
        """
        self.ttl_s = ttl_s
        self._address = address
        try:
            self._patient = address.bucket_at(address.url, patience_s)
            self._hurried = address.bucket_at(address.url, hurried_s, large_answers=True)
            self._public = address.bucket_at(address.public_url, 0)
        except (BaseError, OSError, ValueError) as error:
            raise ObjectStoreError(
                f"the object store at {address.url} cannot be used: {error}"
            ) from error
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `ObjectStore.start`."""
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="object sweeper")

    async def stop(self) -> None:
        """See `ObjectStore.stop`."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper

    def create(self) -> S3Upload:
        """See `ObjectStore.create`."""
        return S3Upload(self)

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        """See `ObjectStore.put`."""
        await self.write(key, content, soon=soon)

    async def get(self, key: str) -> bytes | None:
        """See `ObjectStore.get`."""
        if not is_key(key):
            return None
        for looks_again in (True, False):
            with self._told(), contextlib.suppress(FileNotFoundError):
                found = await obstore.get_async(self._hurried, key)
                return (await found.bytes_async()).to_bytes()
            if looks_again:
                await asyncio.sleep(REPLACING_S)
        return None

    async def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        if is_key(key):
            with self._told(), contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(self._hurried, key)

    def url(self, key: str, base_url: str, *, once: bool = False) -> str:
        """See `ObjectStore.url`. Clients fetch from the store itself, so `base_url` has no say."""
        check(key)
        valid = min(math.ceil(self.ttl_s), _LONGEST_SIGNATURE_S)
        return obstore.sign(self._public, "GET", key, timedelta(seconds=valid))

    async def write(self, key: str, content: bytes | mmap.mmap, *, soon: bool = False) -> None:
        """Store memory as it lies there; in parts if it is large. `soon`: see `ObjectStore.put`.

        Raises:
            ObjectStoreError: if the store is away, and stays away for long.
        """
        check(key)
        bucket = self._hurried if soon else self._patient
        with self._told():
            try:
                await _write(bucket, key, content)
            except FileNotFoundError:
                await self._make_bucket()
                await _write(bucket, key, content)

    async def sweep(self) -> None:
        """Delete every object older than its time. Other servers may do the same meanwhile.

        Raises:
            ObjectStoreError: if the store is away.
        """
        with self._told():
            for folder in SWEPT:
                await self._sweep(folder)

    async def _make_bucket(self) -> None:
        """Make the bucket, for which obstore has no call: an address of its own kind is signed for it."""
        import httpx

        url = obstore.sign(self._patient, "PUT", "", timedelta(seconds=_BUCKET_S))
        try:
            async with httpx.AsyncClient(verify=self._address.tls(), timeout=_BUCKET_S) as http:
                answer = await http.put(url, content=self._address.location())
        except httpx.HTTPError as error:
            raise ObjectStoreError(
                f"the object store at {self._address.url} cannot be reached: {error}"
            ) from error
        # Another server may have made it meanwhile.
        if answer.status_code not in (_MADE, _THERE):
            status = f"{answer.status_code} {answer.reason_phrase}"
            raise ObjectStoreError(answered(self._address.url, status, answer.text))

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await self.sweep()
            except ObjectStoreError as error:
                logger.warning("what is past its time is not deleted now: %s", error)
            await asyncio.sleep(min(_SWEEP_AT_LEAST_EVERY_S, self.ttl_s / _SWEEPS_PER_LIFETIME))

    async def _sweep(self, folder: str) -> None:
        age = timedelta(seconds=lifetime_s(folder, self.ttl_s) + _CLOCK_S)
        try:
            async for found in obstore.list(self._hurried, folder, chunk_size=1000):
                oldest = datetime.now(timezone.utc) - age
                past = [
                    each["path"]
                    for each in found
                    if is_ours(each["path"]) and each["last_modified"] < oldest
                ]
                with contextlib.suppress(FileNotFoundError):
                    await obstore.delete_async(self._hurried, past)
        except BaseError as error:
            if not no_bucket(error):
                raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise ObjectStoreError(sentence(self._address.url, error)) from error


async def _write(bucket: Bucket, key: str, content: bytes | mmap.mmap) -> None:
    await obstore.put_async(bucket, key, content, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)
