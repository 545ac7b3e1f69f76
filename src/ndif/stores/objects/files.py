"""Objects as files of one folder, at URLs that this server signs and serves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkstemp

from ndif.schema.payload import Payload, PayloadFile
from ndif.stores.disk import disk_problem, has_no_writer, open_private, space_problem, sync
from ndif.stores.objects.port import SWEPT, DiskError, check, is_key, is_ours, lifetime_s
from ndif.stores.objects.result_quota import ResultQuota, ResultQuotaLimits, StoredObject
from ndif.tasks import end
from ndif.telemetry import metrics

logger = logging.getLogger(__name__)

_SWEEPS_PER_LIFETIME = 10
PART = ".ndif-part-"
"""Prefix of the names of files that are not objects yet."""
_MAX_DIGITS = 12
_SIGNING_KEY = ".signing"
_SIGNING_BYTES = 32
_REFETCH_S = 2.0
"""Seconds for which a fetched object can be fetched again, as by a proxy that lost its connection."""


class FileUpload:
    """A temporary file, renamed to its key when it is complete."""

    def __init__(self, root: Path) -> None:
        self._root = root
        with _disk_errors():
            self._fd, self._part = mkstemp(prefix=PART, dir=root)

    def fileno(self) -> int:
        return self._fd

    def seal(self) -> bool:
        with _disk_errors():
            written, self._fd = self._fd, os.open(self._part, os.O_RDONLY | os.O_CLOEXEC)
        os.close(written)
        return has_no_writer(self._fd)

    async def commit(self, key: str) -> int:
        size = os.fstat(self._fd).st_size
        check(key)
        target = self._root / key
        with _disk_errors():
            target.parent.mkdir(exist_ok=True)
            os.replace(self._part, target)  # noqa: PTH105 - one system call, which hardly blocks
        os.close(self._fd)
        self._fd = -1
        return size

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            Path(self._part).unlink(missing_ok=True)


class FileStore:
    """The embedded form of `ObjectStore`."""

    def __init__(
        self,
        root: Path,
        ttl_s: float,
        secret: str | None = None,
        limits: ResultQuotaLimits = ResultQuotaLimits(),  # noqa: B008 - it is immutable
        response_ttl_s: float | None = None,
    ) -> None:
        """Keep results in `root` for `ttl_s` seconds; responses too, unless `response_ttl_s` is given."""
        root.mkdir(parents=True, exist_ok=True)
        self.root = self.folder = root.resolve()
        self.ttl_s = ttl_s
        self.response_ttl_s = ttl_s if response_ttl_s is None else response_ttl_s
        self.limits = limits
        self.room = ResultQuota(self)
        # A random secret makes URLs invalid that were signed before a restart.
        self._secret = secret.encode() if secret else secrets.token_bytes(32)
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="results sweeper")

    async def stop(self) -> None:
        if self._sweeper is not None:
            await end([self._sweeper])

    async def ping(self) -> None:
        """See `ObjectStore.ping`. A file is created and deleted."""
        try:
            self.create().discard()
        except FileNotFoundError as error:  # the folder is gone
            raise DiskError(disk_problem(error)) from error

    def create(self) -> FileUpload:
        return FileUpload(self.root)

    async def create_for(self, size: int) -> FileUpload:
        """See `ObjectStore.create_for`. No room is reserved: on a full disk the writer gets an error."""
        return self.create()

    def create_payload(self) -> PayloadFile:
        with _disk_errors():
            return PayloadFile.create(self.root, PART)

    async def put_payload(self, key: str, payload: Payload) -> None:
        if not isinstance(payload, PayloadFile):
            await self.put(key, bytes(payload))
            return
        target = self.path(key)
        with _disk_errors():
            target.parent.mkdir(exist_ok=True)
            await asyncio.to_thread(payload.link, target)

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        upload = self.create()
        try:
            with _disk_errors(), open(upload.fileno(), "wb", closefd=False) as file:  # noqa: ASYNC230
                file.write(content)
            await upload.commit(key)
        finally:
            upload.discard()

    async def get(self, key: str) -> bytes | None:
        try:
            with _disk_errors():
                return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    async def delete(self, key: str) -> None:
        with _disk_errors(), contextlib.suppress(FileNotFoundError):
            self.path(key).unlink()

    async def unexpired(self, folder: str) -> Mapping[str, StoredObject]:
        with _disk_errors():
            return await asyncio.to_thread(self._unexpired, folder)

    def _unexpired(self, folder: str) -> dict[str, StoredObject]:
        objects = {}
        for path in (self.root / folder).glob("*"):
            if is_ours(f"{folder}/{path.name}"):
                _delete_old(path, lifetime_s(folder, self))
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    age_s = time.time() - status.st_mtime
                    objects[path.name] = StoredObject(status.st_size, age_s)
        return objects

    def problem(self) -> str | None:
        return space_problem(self.root)

    async def settle(self, *keys: str) -> None:
        with _disk_errors():
            await asyncio.to_thread(_settle, [self.path(key) for key in keys])

    def ids(self, folder: str) -> set[str]:
        """Return the ids of the jobs that have a non-empty object in a folder."""
        with _disk_errors():
            paths = (self.root / folder).glob("*")
            names = [path.name for path in paths if path.stat().st_size]
        return {name.partition(".")[0] for name in names if is_ours(f"{folder}/{name}")}

    def path(self, key: str) -> Path:
        """Return the path of an object; raise a `FileNotFoundError` for an invalid or outside key."""
        path = self.root / key
        if not is_key(key) or not path.resolve().is_relative_to(self.root):
            raise FileNotFoundError(key[:100])
        return path

    def url(self, key: str, base_url: str, *, once: bool = False) -> str:
        """See `ObjectStore.url`. The gateway serves `results/{id}.pt` at `/results/{id}`."""
        expires = int(time.time() + self.ttl_s)
        path, signature = key.removesuffix(".pt"), self._sign(key, expires, once=once)
        address = f"{base_url}/{path}?expires={expires}&signature={signature}"
        return f"{address}&once=1" if once else address

    def verify(self, key: str, expires: str, signature: str, *, once: bool = False) -> bool:
        """Return True if `signature` is valid for this key and has not expired."""
        if not (expires.isascii() and expires.isdigit() and len(expires) <= _MAX_DIGITS):
            return False
        if int(expires) < time.time():
            return False
        signature_bytes = signature.encode(errors="replace")
        return hmac.compare_digest(
            self._sign(key, int(expires), once=once).encode(), signature_bytes
        )

    def fetched(self, key: str) -> None:
        """Delete an object soon after its fetch; its URL was signed with `once`.

        This frees its memory before the disk has to write it. Otherwise four clients that each fetch 256 MB
        a second would fill the page cache with objects that are never fetched again.
        """
        path = self.path(key)
        loop = asyncio.get_running_loop()
        loop.call_later(_REFETCH_S, lambda: path.unlink(missing_ok=True))

    def _sign(self, key: str, expires: int, *, once: bool) -> str:
        text = f"{key}\n{expires}\n{once}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await self.sweep()
            except DiskError as error:
                logger.warning("expired results cannot be deleted: %s", error)
            await asyncio.sleep(min(60.0, self.ttl_s / _SWEEPS_PER_LIFETIME))

    async def sweep(self, *, dry: bool = False) -> Mapping[str, int]:
        """See `ObjectStore.sweep`. Abandoned uploads are deleted too."""
        with _disk_errors():
            # In a thread: the folder may be large and the disk slow.
            deleted = await asyncio.to_thread(self._sweep, dry)
        if not dry:
            metrics.deleted(deleted)
        return deleted

    def _sweep(self, dry: bool) -> dict[str, int]:
        if not dry:
            delete_parts(self.root, self.ttl_s)
        return {
            folder: sum(
                _delete_old(path, lifetime_s(folder, self), dry=dry)
                for path in (self.root / folder).glob("*")
                if is_ours(f"{folder}/{path.name}")
            )
            for folder in SWEPT
        }


def signing_key(root: Path) -> str:
    """Return the key that signs URLs of a folder's results; create it if there is none.

    The key is stored with the results, so that their URLs stay valid after a restart.
    """
    path = root / _SIGNING_KEY
    with contextlib.suppress(FileNotFoundError):
        if stored_key := path.read_text():
            return stored_key
    key = secrets.token_hex(_SIGNING_BYTES)
    with open_private(path) as file:
        file.write(key)
    return key


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn each `OSError` into a `DiskError`, except a `FileNotFoundError`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DiskError(disk_problem(error)) from error


def _settle(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            sync(path)
    sync(*{path.parent for path in paths if path.parent.exists()})


def delete_parts(folder: Path, age_s: float) -> None:
    """Delete abandoned uploads of at least `age_s` seconds from a folder."""
    for path in folder.glob(f"{PART}*"):
        _delete_old(path, age_s)


def _delete_old(path: Path, age_s: float, *, dry: bool = False) -> bool:
    """Delete a file of at least that age, unless `dry`; return True if it was that old."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_mtime < time.time() - age_s:
            if not dry:
                path.unlink()
            return True
    return False
