"""Objects in an S3 bucket; clients fetch results from the bucket itself."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import mmap
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING
from weakref import WeakSet

# obstore, in Rust: uploads memory in parts without a copy, retries each, and signs for any host.
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store as Bucket

from ndif.schema.payload import ZSTD_MAGIC, Payload, PayloadFile
from ndif.sizes import format_size
from ndif.stores.memory import left_for_results
from ndif.stores.objects.files import PART, delete_parts
from ndif.stores.objects.port import (
    SWEPT,
    MemoryFullError,
    ObjectStoreError,
    check,
    file_name,
    is_key,
    is_ours,
    lifetime_s,
)
from ndif.stores.objects.result_quota import ResultQuota, ResultQuotaLimits, StoredObject
from ndif.tasks import end
from ndif.telemetry import metrics

if TYPE_CHECKING:
    from obstore import Attributes
    from obstore.store import ClientConfig, S3Credential

logger = logging.getLogger(__name__)

_SECOND = timedelta(seconds=1)
_REQUEST = 30 * _SECOND
"""Time after which a part that was not accepted is sent again."""
_LARGE_ANSWER = 600 * _SECOND
_UNLIMITED = 1000
"""Number of retries that is never reached, because the time limit ends them first."""
_HOME_REGION = "us-east-1"
"""The only region that a request for a new bucket must not name."""
_PART = 16 << 20
_PARTS_AT_ONCE = 4
_PATIENCE_S, _HURRIED_S = 60.0, 5.0
_BUCKET_S = 30.0
_LONGEST_SIGNATURE_S = 7 * 86_400
_SWEEPS_PER_LIFETIME = 10
_MAX_SWEEP_INTERVAL_S = 600.0
_REPLACING_S = 0.1
"""Seconds before a missing object is read again: while Swift replaces an object, it is missing briefly."""
_POLL_S = 0.1
"""Seconds between two checks for the memory that an upload waits for."""
_BLOCK = 512
"""Unit of `st_blocks`, in bytes."""
_CLOCK_S = 1.0
"""Resolution of the times that S3 reports."""
_CREATED, _EXISTS = 200, 409
_MISSING_KEY = "responses/ping.json"
"""Key that no object has, for `ping`."""

_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z ]*[A-Za-z])")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_CAUSES_BY_KIND = {
    "TimedOut": "it does not answer in time",
    "IncompleteMessage": "it closed the connection",
    "ConnectionReset": "it closed the connection",
}
_CREDENTIAL_ERRORS = frozenset({"SignatureDoesNotMatch", "InvalidAccessKeyId", "AccessDenied"})
_TRUST = "see NDIF_OBJECT_STORE_VERIFY"
_ADVICE = "; see NDIF_OBJECT_STORE_ACCESS_KEY and NDIF_OBJECT_STORE_SECRET_KEY"


def no_bucket(error: Exception) -> bool:
    """Return True if the server answers that the bucket does not exist."""
    match = _CODE.search(str(error))
    return match is not None and match[1] == "NoSuchBucket"


def describe_refusal(url: str, status: str, body: str) -> str:
    """Return a sentence about a server's refusal."""
    code = _CODE.search(body)
    if code is None:
        return f"the object store at {url} answers {status}"
    message = _MESSAGE.search(body)
    words = f": {message[1].rstrip('.')}" if message is not None else ""
    advice = _ADVICE if code[1] in _CREDENTIAL_ERRORS else ""
    return f"the object store at {url} refuses ({code[1]}{words}){advice}"


def describe_error(url: str, error: Exception) -> str:
    """Return a sentence about an error of obstore."""
    text = str(error)
    if status := _STATUS.search(text):
        return describe_refusal(url, status[1], text)
    # The innermost cause comes last in obstore's text.
    causes = _CAUSE.findall(text)
    if certificate := _CERTIFICATE.search(text):
        causes.append(f"its certificate is not trusted ({certificate[1]}); {_TRUST}")
    causes += [words for kind, words in _CAUSES_BY_KIND.items() if kind in text]
    cause = causes[-1] if causes else text.partition("\n")[0]
    return f"the object store at {url} cannot be reached: {cause}"


@dataclass(frozen=True, slots=True)
class S3Address:
    """A bucket, and this server's credentials for it."""

    url: str
    public_url: str
    """URL of the same server, as clients reach it."""
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str = "ndif"
    region: str = _HOME_REGION
    verify: bool | Path = True
    """Check of the server's certificate: by the system's authorities, by a file of them, or none."""

    def bucket_at(self, url: str, patience_s: float, *, large_answers: bool = False) -> Bucket:
        """Return a client of the bucket at `url`, which retries an unreachable server for `patience_s`.

        With `large_answers`, an answer may take ten minutes if it never pauses for `patience_s`.
        """
        credential: S3Credential = {
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "token": None,
            "expires_at": None,
        }
        client: ClientConfig = {
            "allow_http": True,
            "connect_timeout": 5 * _SECOND,
            "timeout": _REQUEST,
        }
        if large_answers:
            client |= {"timeout": _LARGE_ANSWER, "read_timeout": patience_s * _SECOND}
        if self.verify is False:
            client["allow_invalid_certificates"] = True
        elif isinstance(self.verify, Path):
            client["root_certificate"] = self.verify.read_bytes()
        return Bucket(
            self.bucket,
            config={
                "endpoint": url,
                # Amazon's variables in the environment would override `endpoint`.
                "aws_endpoint_url_s3": url,
                "region": self.region,
                "skip_signature": False,
                "virtual_hosted_style_request": False,
                # TLS protects the content in transit; without TLS a signature over the content does.
                "unsigned_payload": url.startswith("https:"),
                # Some S3 servers cannot delete many objects at once.
                "disable_bulk_delete": True,
            },
            client_options=client,
            # Credentials by name would be mixed with Amazon's variables in the environment.
            credential_provider=lambda: credential,
            retry_config={
                "max_retries": _UNLIMITED,
                "retry_timeout": patience_s * _SECOND,
                "backoff": {"init_backoff": _SECOND / 10, "max_backoff": 2 * _SECOND, "base": 2},
            },
        )


def _attributes(key: str, content: bytes | mmap.mmap) -> Attributes | None:
    """Return the headers of an object: for a result, the name under which browsers save it.

    Browsers fetch results from the bucket itself, and a link cannot name a file of another host.
    """
    if not key.startswith("results/"):
        return None
    name = file_name(key, content[: len(ZSTD_MAGIC)])
    return {"Content-Disposition": f'attachment; filename="{name}"'}


class S3Upload:
    """A file in memory that a runner writes to."""

    def __init__(self, store: S3Store, size: int = 0) -> None:
        """Create an empty file; `size` is the number of bytes that the runner announced."""
        self._store = store
        self._size = size
        self._fd = os.memfd_create("result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # A memory file that shrinks while it is mapped would kill this process.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def fileno(self) -> int:
        return self._fd

    @property
    def unwritten(self) -> int:
        """Return the bytes that are still to come; written bytes already count as used memory."""
        if self._fd < 0:
            return 0
        return max(0, self._size - os.fstat(self._fd).st_blocks * _BLOCK)

    def seal(self) -> bool:
        """See `Upload.seal`. False while another process has the memory mapped for writing."""
        written = self._fd
        # Before Linux 6.7, sealed memory is mapped only from a descriptor that cannot write.
        self._fd = os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.fcntl(written, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
        except OSError:
            return False
        finally:
            os.close(written)
        return True

    async def commit(self, key: str) -> int:
        self._size = 0  # no more is written, even if compression left fewer bytes
        size = os.fstat(self._fd).st_size
        content = mmap.mmap(self._fd, size, prot=mmap.PROT_READ) if size else b""
        await self._store.put(key, content)
        self.discard()
        return size

    def discard(self) -> None:
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
        response_ttl_s: float | None = None,
        folder: Path | None = None,
        limits: ResultQuotaLimits = ResultQuotaLimits(),  # noqa: B008 - it is immutable
        patience_s: float = _PATIENCE_S,
        hurried_s: float = _HURRIED_S,
        memory: Callable[[], int] = left_for_results,
    ) -> None:
        """Create a store whose bucket is created with the first object.

        Received payloads lie in `folder`, by default the folder of temporary files, until they are stored.
        A write that must not be lost is retried for `patience_s`, everything else for `hurried_s`. `memory`
        returns the bytes of memory that are left for uploads.
        """
        self.ttl_s = ttl_s
        self.response_ttl_s = ttl_s if response_ttl_s is None else response_ttl_s
        self.limits = limits
        self.room = ResultQuota(self)
        self._memory = memory
        self._patience_s = patience_s
        self._uploads: WeakSet[S3Upload] = WeakSet()
        self._address = address
        self.folder = folder or Path(gettempdir())
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
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="object sweeper")

    async def stop(self) -> None:
        if self._sweeper is not None:
            await end([self._sweeper])

    async def ping(self) -> None:
        """See `ObjectStore.ping`. The store reports that an object is missing."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            await obstore.head_async(self._hurried, _MISSING_KEY)

    def create(self) -> S3Upload:
        return S3Upload(self)

    async def create_for(self, size: int) -> S3Upload:
        """See `ObjectStore.create_for`. Memory becomes free once other uploads are stored."""
        deadline = time.monotonic() + self._patience_s
        while size > (room := self._memory() - sum(pending.unwritten for pending in self._uploads)):
            if time.monotonic() > deadline:
                left = format_size(max(0, room))
                raise MemoryFullError(
                    f"it takes {format_size(size)}, and this server has {left} of memory for results on "
                    "their way to its object store. Save fewer values, or reduce them inside the trace"
                )
            await asyncio.sleep(_POLL_S)
        upload = S3Upload(self, size)
        self._uploads.add(upload)
        return upload

    def create_payload(self) -> PayloadFile:
        self.folder.mkdir(parents=True, exist_ok=True)
        return PayloadFile.create(self.folder, PART)

    async def put_payload(self, key: str, payload: Payload) -> None:
        """See `ObjectStore.put_payload`. A file is mapped and sent without a copy."""
        if not isinstance(payload, PayloadFile):
            await self.put(key, bytes(payload))
            return
        with payload.path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        await self.put(key, content)

    async def put(self, key: str, content: bytes | mmap.mmap, *, soon: bool = False) -> None:
        """See `ObjectStore.put`. Memory is sent without a copy, in parts if it is large."""
        check(key)
        bucket = self._hurried if soon else self._patient
        write = partial(
            obstore.put_async,
            bucket,
            key,
            content,
            attributes=_attributes(key, content),
            chunk_size=_PART,
            max_concurrency=_PARTS_AT_ONCE,
        )
        with self._errors():
            try:
                await write()
            except FileNotFoundError:
                await self._create_bucket()
                await write()

    async def get(self, key: str) -> bytes | None:
        if not is_key(key):
            return None
        # An end is never replaced, so a poll of a running job need not read it twice.
        for may_retry in (not key.startswith("ends/"), False):
            with self._errors(), contextlib.suppress(FileNotFoundError):
                response = await obstore.get_async(self._hurried, key)
                return (await response.bytes_async()).to_bytes()
            if may_retry:
                await asyncio.sleep(_REPLACING_S)
        return None

    async def delete(self, key: str) -> None:
        if is_key(key):
            with self._errors(), contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(self._hurried, key)

    def problem(self) -> str | None:
        """See `ObjectStore.problem`. S3 does not report its free space."""
        return None

    async def settle(self, *keys: str) -> None:
        """See `ObjectStore.settle`. An S3 server keeps every object that it has accepted."""

    def url(self, key: str, base_url: str, *, once: bool = False) -> str:
        """See `ObjectStore.url`. Clients fetch from the bucket itself, so `base_url` is not used."""
        check(key)
        valid = min(math.ceil(self.ttl_s), _LONGEST_SIGNATURE_S)
        return obstore.sign(self._public, "GET", key, timedelta(seconds=valid))

    async def sweep(self, *, dry: bool = False) -> Mapping[str, int]:
        """See `ObjectStore.sweep`. Other processes may sweep at the same time."""
        if not dry:
            delete_parts(self.folder, self.ttl_s)
        deleted = dict.fromkeys(SWEPT, 0)
        with self._errors():
            try:
                for folder in SWEPT:
                    deleted[folder] = await self._sweep(folder, dry=dry)
            except BaseError as error:
                if not no_bucket(error):
                    raise
        if not dry:
            metrics.deleted(deleted)
        return deleted

    async def unexpired(self, folder: str) -> Mapping[str, StoredObject]:
        kept: dict[str, StoredObject] = {}
        with self._errors():
            try:
                await self._sweep(folder, kept)
            except BaseError as error:
                if not no_bucket(error):
                    raise
        return kept

    async def _sweep(
        self, folder: str, kept: dict[str, StoredObject] | None = None, *, dry: bool = False
    ) -> int:
        """Delete the expired objects of a folder, unless `dry`, and add the others to `kept`.

        Return the number of expired objects.
        """
        expired, age = 0, timedelta(seconds=lifetime_s(folder, self) + _CLOCK_S)
        async for listed in obstore.list(self._hurried, folder, chunk_size=1000):
            now = datetime.now(timezone.utc)
            ours = [item for item in listed if is_ours(item["path"])]
            past = [item["path"] for item in ours if item["last_modified"] < now - age]
            expired += len(past)
            if not dry:
                with contextlib.suppress(FileNotFoundError):
                    await obstore.delete_async(self._hurried, past)
            if kept is not None:
                kept.update(
                    (
                        item["path"].rpartition("/")[2],
                        StoredObject(item["size"], (now - item["last_modified"]).total_seconds()),
                    )
                    for item in ours
                    if item["last_modified"] >= now - age
                )
        return expired

    async def _create_bucket(self) -> None:
        """Create the bucket with a signed request, because obstore has no call for it."""
        import httpx

        address = self._address
        tls: ssl.SSLContext | bool | Path = address.verify
        if isinstance(tls, Path):
            tls = ssl.create_default_context(cafile=tls)
        region_xml = (
            '<CreateBucketConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<LocationConstraint>{address.region}</LocationConstraint></CreateBucketConfiguration>"
        )
        content = "" if address.region == _HOME_REGION else region_xml
        url = obstore.sign(self._patient, "PUT", "", timedelta(seconds=_BUCKET_S))
        try:
            async with httpx.AsyncClient(verify=tls, timeout=_BUCKET_S) as http:
                answer = await http.put(url, content=content)
        except httpx.HTTPError as error:
            raise ObjectStoreError(
                f"the object store at {address.url} cannot be reached: {error}"
            ) from error
        # Another server may have created the bucket meanwhile.
        if answer.status_code not in (_CREATED, _EXISTS):
            status = f"{answer.status_code} {answer.reason_phrase}"
            raise ObjectStoreError(describe_refusal(address.url, status, answer.text))

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await self.sweep()
            except ObjectStoreError as error:
                logger.warning("expired objects are not deleted now: %s", error)
            await asyncio.sleep(min(_MAX_SWEEP_INTERVAL_S, self.ttl_s / _SWEEPS_PER_LIFETIME))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the errors of obstore into `ObjectStoreError`."""
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise ObjectStoreError(describe_error(self._address.url, error)) from error
