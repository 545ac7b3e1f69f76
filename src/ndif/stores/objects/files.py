"""Objects as files of one folder, with addresses that this server signs and answers itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path
from tempfile import mkstemp

from ndif.stores.objects.keys import SWEPT, check, is_key, is_ours, lifetime_s

_SWEEPS_PER_LIFETIME = 10
_PART = ".ndif-part-"
_MAX_DIGITS = 12
_REGRET_S = 2.0
"""How long what was fetched can be fetched again, by a proxy that lost its connection, say."""


class FileUpload:
    """A file that has no name until it is whole."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fd, self._part = mkstemp(prefix=_PART, dir=root)

    def fileno(self) -> int:
        """See `Upload.fileno`."""
        return self._fd

    async def commit(self, key: str) -> int:
        """See `Upload.commit`."""
        size = os.fstat(self._fd).st_size
        check(key)
        target = self._root / key
        target.parent.mkdir(exist_ok=True)
        os.replace(self._part, target)  # noqa: PTH105 - one system call, no blocking to speak of
        os.close(self._fd)
        self._fd = -1
        return size

    def discard(self) -> None:
        """See `Upload.discard`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            Path(self._part).unlink(missing_ok=True)


class FileStore:
    """The embedded form of `ObjectStore`."""

    def __init__(self, root: Path, ttl_s: float, secret: str | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()
        self.ttl_s = ttl_s
        # Without one, addresses that were signed before a restart are void after it.
        self._secret = secret.encode() if secret else secrets.token_bytes(32)
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `ObjectStore.start`."""
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="results sweeper")

    async def stop(self) -> None:
        """See `ObjectStore.stop`."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper

    def create(self) -> FileUpload:
        """See `ObjectStore.create`."""
        return FileUpload(self.root)

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        """See `ObjectStore.put`."""
        upload = self.create()
        try:
            with open(upload.fileno(), "wb", closefd=False) as file:  # noqa: ASYNC230
                file.write(content)
            await upload.commit(key)
        finally:
            upload.discard()

    async def get(self, key: str) -> bytes | None:
        """See `ObjectStore.get`."""
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    async def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with contextlib.suppress(FileNotFoundError):
            self.path(key).unlink()

    def path(self, key: str) -> Path:
        """Where `key` lies.

        Raises:
            FileNotFoundError: for what is no key, and for what leads outside the store.
        """
        path = self.root / key
        if not is_key(key) or not path.resolve().is_relative_to(self.root):
            raise FileNotFoundError(key[:100])
        return path

    def url(self, key: str, base_url: str, *, once: bool = False) -> str:
        """See `ObjectStore.url`. `results/{id}.pt` is answered at `/results/{id}`."""
        expires = int(time.time() + self.ttl_s)
        path, signature = key.removesuffix(".pt"), self._sign(key, expires, once=once)
        address = f"{base_url}/{path}?expires={expires}&signature={signature}"
        return f"{address}&once=1" if once else address

    def verify(self, key: str, expires: str, signature: str, *, once: bool = False) -> bool:
        """Whether `signature` is ours for this key and its time has not passed."""
        if not (expires.isascii() and expires.isdigit() and len(expires) <= _MAX_DIGITS):
            return False
        if int(expires) < time.time():
            return False
        given = signature.encode(errors="replace")
        return hmac.compare_digest(self._sign(key, int(expires), once=once).encode(), given)

    def fetched(self, key: str) -> None:
        """Delete in a moment what was signed to be fetched once, and has been.

        Memory that a file took is free again before the disk had to write it: four clients that each
        fetch 256 MB a second would otherwise fill the page cache with what nobody will ask for.
        """
        path = self.path(key)
        loop = asyncio.get_running_loop()
        loop.call_later(_REGRET_S, lambda: path.unlink(missing_ok=True))

    def _sign(self, key: str, expires: int, *, once: bool) -> str:
        text = f"{key}\n{expires}\n{once}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    async def _sweep_forever(self) -> None:
        while True:
            self.sweep()
            await asyncio.sleep(min(60.0, self.ttl_s / _SWEEPS_PER_LIFETIME))

    def sweep(self) -> None:
        """Delete every object older than its time, and uploads that nobody finished."""
        for path in self.root.glob(f"{_PART}*"):
            _delete_old(path, self.ttl_s)
        for folder in SWEPT:
            for path in (self.root / folder).glob("*"):
                if is_ours(f"{folder}/{path.name}"):
                    _delete_old(path, lifetime_s(folder, self.ttl_s))


def _delete_old(path: Path, age_s: float) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_mtime < time.time() - age_s:
            path.unlink()
