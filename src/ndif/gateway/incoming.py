"""Bodies and messages on their way here: their budget, their time, and how a payload reaches the disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.requests import Request as HttpRequest

from ndif.config.groups import RequestSettings
from ndif.gateway.http_error import CLOSE, RETRY_SOON, HttpError
from ndif.schema.payload import MAX_IN_MEMORY, Payload, PayloadFile
from ndif.sizes import format_size
from ndif.stores.disk import disk_problem
from ndif.stores.objects import DiskError
from ndif.tasks import timeout

_WORTH_KEEPING = 4096
"""Smallest piece of a payload that is kept as it came; smaller ones are copied together."""
MAX_ENVELOPE = 1 << 20
"""Bytes that a request may have beside its payload, and a message of a client without a job in all."""
_IN_MEMORY = 256 << 20
"""Bytes of the budget that may be in memory."""
_STEP = 256 << 10
"""Bytes that a body must bring within the idle time, and that are counted before they come."""


async def read_body(http: HttpRequest, most_bytes: int, refusal: str) -> bytes:
    """Return a small body; raise an HttpError (413) that says `refusal` if it is larger than it may be."""
    content = bytearray()
    async for chunk in http.stream():
        content += chunk
        if len(content) > most_bytes:
            raise HttpError(413, refusal, CLOSE)
    return bytes(content)


class IncomingFullError(Exception):
    """Too much is unfinished; `of_address` is true if all of that came from the sender's address."""

    def __init__(self, held: int, *, of_address: bool) -> None:
        super().__init__(f"{format_size(held)} are unfinished")
        self.of_address = of_address


class Incoming:
    """The budget of everything that is unfinished: bodies of requests, and messages on live channels.

    Half of it is an address's share, and 256 MiB of it may be in memory, half of that for an address. What
    is the only one of its kind may be larger, as far as its own limit allows.
    """

    def __init__(self, settings: RequestSettings) -> None:
        self.max_request_bytes = settings.max_request_bytes
        self.idle_s = settings.incoming_idle_s
        self.timeout_s = settings.incoming_timeout_s
        limit = settings.max_incoming_bytes
        self._all = _Account(limit)
        self._in_memory = _Account(min(limit, _IN_MEMORY))

    @contextlib.contextmanager
    def open(self, address: str) -> Iterator[Unfinished]:
        """Count what comes from `address` until the end of the block."""
        unfinished = Unfinished(address, self._all, self._in_memory)
        try:
            yield unfinished
        finally:
            unfinished.hold(0, 0)

    def message(self, address: str) -> Unfinished:
        """Return the account of the unfinished message of a connection, which holds it until the end."""
        return Unfinished(address, self._all, self._in_memory)

    async def body(
        self, http: HttpRequest, unfinished: Unfinished, most: int | None = None
    ) -> AsyncIterator[list[bytes]]:
        """Yield the chunks of a body, of `most` bytes at most, in lists of about 256 KiB.

        A body that is too large, too slow or more than the server takes now is an `HttpError`.
        """
        limit, whose = self.max_request_bytes, "this server takes (NDIF_MAX_REQUEST_BYTES)"
        if most is not None and most < limit:
            limit, whose = most, "your API key may send"
        length = http.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise _too_large(limit, whose)
        ends_at = asyncio.get_running_loop().time() + self.timeout_s
        stream = http.stream()
        total, is_whole = 0, False
        while not is_whole:
            expected = (
                min(_STEP, int(length) - total) if "content-length" in http.headers else _STEP
            )
            chunks, size = list[bytes](), 0
            left = ends_at - asyncio.get_running_loop().time()
            try:
                unfinished.add(expected)
                async with timeout(min(self.idle_s, left)):
                    while size < _STEP and not is_whole:
                        chunk = await anext(stream, None)
                        is_whole = chunk is None
                        if chunk:
                            chunks.append(chunk)
                            size += len(chunk)
                unfinished.add(size - expected)
            except IncomingFullError as error:
                raise refusal(error) from error
            except asyncio.TimeoutError as error:
                raise _too_slow(min(self.idle_s, left)) from error
            total += size
            if total > limit:
                raise _too_large(limit, whose)
            yield chunks


class _Account:
    """Bytes that are held in all and by each address, and how many that may be."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._by_address: Counter[str] = Counter()

    def change(self, address: str, before: int, after: int) -> None:
        """Count `after` bytes instead of `before`; raise an `IncomingFullError` if that is too many."""
        held = self._by_address[address]
        if after > before:
            for others, most, of_address in (
                (held - before, self._limit // 2, True),
                (self._held - before, self._limit, False),
            ):
                if others and others + after > most:
                    raise IncomingFullError(others, of_address=of_address)
        self._held += after - before
        self._by_address[address] += after - before
        if not self._by_address[address]:
            del self._by_address[address]


class Unfinished:
    """One body or message that is on its way."""

    def __init__(self, address: str, everything: _Account, in_memory: _Account) -> None:
        self._address = address
        self._everything = everything
        self._in_memory = in_memory
        self.size = 0
        """Bytes that have arrived."""
        self._memory = 0

    def add(self, count: int) -> None:
        """Count bytes that have arrived, into memory."""
        self.hold(self.size + count, self._memory + count)

    def to_disk(self, count: int) -> None:
        """Count bytes that are on the disk from now on."""
        self.hold(self.size, self._memory - count)

    def hold(self, size: int, memory: int) -> None:
        """Count so many bytes, and so many of them in memory."""
        self._everything.change(self._address, self.size, size)
        self.size = size
        self._in_memory.change(self._address, self._memory, memory)
        self._memory = memory


class IncomingPayload:
    """A payload as it arrives: in memory up to 1 MiB, then in a file."""

    def __init__(self, create: Callable[[], PayloadFile], unfinished: Unfinished) -> None:
        self._create = create
        self._unfinished = unfinished
        self._tail: list[bytearray | memoryview] = []
        self._tail_size = 0
        self._file: PayloadFile | None = None

    def add(self, data: bytes | memoryview) -> None:
        """Take more of it, into memory."""
        self._tail_size += len(data)
        if len(data) >= _WORTH_KEEPING:
            self._tail.append(memoryview(data))
        elif self._tail and isinstance(last := self._tail[-1], bytearray):
            last += data
        else:
            self._tail.append(bytearray(data))

    async def spill(self) -> None:
        """Write to the disk what is more than memory may hold."""
        if self._tail_size > MAX_IN_MEMORY:
            await self._write()

    async def finish(self) -> Payload:
        """Return all of it."""
        if self._file is None:
            return bytearray().join(self._tail)
        await self._write()
        return self._file

    async def _write(self) -> None:
        tail, size = self._tail, self._tail_size
        self._tail, self._tail_size = [], 0
        try:
            if self._file is None:
                self._file = self._create()
            await asyncio.to_thread(self._file.append, *tail)
        except OSError as error:
            raise DiskError(disk_problem(error)) from error
        self._unfinished.to_disk(size)

    def discard(self) -> None:
        """Delete its file."""
        if self._file is not None:
            self._file.discard()


def refusal(error: IncomingFullError) -> HttpError:
    """Return the answer to a client that sends more than the server takes now."""
    if error.of_address:
        return HttpError(
            429,
            f"Other requests from your address are still being sent ({error}), and with this one they "
            "would be more than the server takes from one address (half of NDIF_MAX_INCOMING_BYTES). Send "
            "it again when they are done.",
            {**CLOSE, **RETRY_SOON},
        )
    return HttpError(
        503,
        f"This server receives as much as it can at once ({error}; NDIF_MAX_INCOMING_BYTES). Try again "
        "in a moment.",
        {**CLOSE, **RETRY_SOON},
    )


def _too_large(limit: int, whose: str) -> HttpError:
    return HttpError(
        413,
        f"The request is larger than {format_size(limit)}, the most {whose}. Does the block refer to a "
        "large object, such as a dataset or another model? Refer only to what it needs.",
        CLOSE,
    )


def _too_slow(waited_s: float) -> HttpError:
    return HttpError(
        408,
        f"The request came too slowly: in the last {waited_s:.0f} s neither its end nor another "
        f"{format_size(_STEP)} arrived. Send it again on a faster connection, or refer to less in the "
        "block.",
        CLOSE,
    )
