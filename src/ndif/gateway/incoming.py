"""Incoming bodies and messages: their memory and disk budget, their deadlines, and payloads on disk."""

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

_MIN_UNCOPIED = 4096
"""Bytes; larger or equal pieces of a payload are kept as they came, smaller ones are copied together."""
MAX_ENVELOPE = 1 << 20
"""Bytes of a request besides its payload; also of a whole message from a client without a running job."""
_IN_MEMORY = 256 << 20
"""Bytes of the budget that may be in memory, the rest being on disk."""
_STEP = 256 << 10
"""Bytes that must arrive within each idle time; they are reserved in the budget before they arrive."""


async def read_body(http: HttpRequest, max_bytes: int, message: str) -> bytes:
    """Return a small body; raise an HttpError (413, `message`) if it has more than `max_bytes`."""
    content = bytearray()
    async for chunk in http.stream():
        content += chunk
        if len(content) > max_bytes:
            raise HttpError(413, message, CLOSE)
    return bytes(content)


class IncomingFullError(Exception):
    """Too many unfinished bytes; `of_address` is True if the limit of the sender's address is exceeded."""

    def __init__(self, held: int, *, of_address: bool) -> None:
        super().__init__(f"{format_size(held)} are unfinished")
        self.of_address = of_address


class Incoming:
    """The budget of all unfinished input: bodies of requests, and messages on live channels.

    One address may use half of it. At most 256 MiB may be in memory, half of that for one address. A
    body or message may exceed the budget, up to its own limit, while no other is unfinished.
    """

    def __init__(self, settings: RequestSettings) -> None:
        self.max_request_bytes = settings.max_request_bytes
        self.idle_s = settings.incoming_idle_s
        self.timeout_s = settings.incoming_timeout_s
        limit = settings.max_incoming_bytes
        self._all = _Budget(limit)
        self._in_memory = _Budget(min(limit, _IN_MEMORY))

    @contextlib.contextmanager
    def open(self, address: str) -> Iterator[IncomingCount]:
        """Yield the byte count of a request from `address`, which is released at the end of the block."""
        unfinished = IncomingCount(address, self._all, self._in_memory)
        try:
            yield unfinished
        finally:
            unfinished.hold(0, 0)

    def message(self, address: str) -> IncomingCount:
        """Return the byte count of a connection's unfinished message, which the connection must release."""
        return IncomingCount(address, self._all, self._in_memory)

    async def body(
        self, http: HttpRequest, unfinished: IncomingCount, max_bytes: int | None = None
    ) -> AsyncIterator[list[bytes]]:
        """Yield the chunks of a body, in lists of about 256 KiB.

        Raise an `HttpError` if it exceeds `max_bytes`, the server's limit or the budget, or is too slow.
        """
        limit, clause = self.max_request_bytes, "this server takes (NDIF_MAX_REQUEST_BYTES)"
        if max_bytes is not None and max_bytes < limit:
            limit, clause = max_bytes, "your API key may send"
        length = http.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise _too_large(limit, clause)
        ends_at = asyncio.get_running_loop().time() + self.timeout_s
        stream = http.stream()
        total, is_whole = 0, False
        while not is_whole:
            expected = (
                min(_STEP, int(length) - total) if "content-length" in http.headers else _STEP
            )
            chunks, size = list[bytes](), 0
            remaining_s = ends_at - asyncio.get_running_loop().time()
            try:
                unfinished.add(expected)
                async with timeout(min(self.idle_s, remaining_s)):
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
                raise _too_slow(min(self.idle_s, remaining_s)) from error
            total += size
            if total > limit:
                raise _too_large(limit, clause)
            yield chunks


class _Budget:
    """A limited count of bytes; one address may hold half of the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._by_address: Counter[str] = Counter()

    def change(self, address: str, before: int, after: int) -> None:
        """Replace `before` bytes by `after`; raise an `IncomingFullError` if others leave no room."""
        held = self._by_address[address]
        if after > before:
            for others, limit, of_address in (
                (held - before, self._limit // 2, True),
                (self._held - before, self._limit, False),
            ):
                if others and others + after > limit:
                    raise IncomingFullError(others, of_address=of_address)
        self._held += after - before
        self._by_address[address] += after - before
        if not self._by_address[address]:
            del self._by_address[address]


class IncomingCount:
    """The byte count of one incoming body or message; raises an `IncomingFullError` over the budget."""

    def __init__(self, address: str, total: _Budget, in_memory: _Budget) -> None:
        self._address = address
        self._total = total
        self._in_memory = in_memory
        self.size = 0
        """Bytes that have arrived."""
        self._memory = 0

    def add(self, count: int) -> None:
        """Count `count` more bytes, in memory."""
        self.hold(self.size + count, self._memory + count)

    def to_disk(self, count: int) -> None:
        """Count `count` bytes as moved from memory to disk."""
        self.hold(self.size, self._memory - count)

    def hold(self, size: int, memory: int) -> None:
        """Set the count to `size` bytes, with `memory` bytes in memory; `hold(0, 0)` releases all."""
        self._total.change(self._address, self.size, size)
        self.size = size
        self._in_memory.change(self._address, self._memory, memory)
        self._memory = memory


class IncomingPayload:
    """A payload while it arrives: in memory up to 1 MiB, then in a file."""

    def __init__(self, create: Callable[[], PayloadFile], unfinished: IncomingCount) -> None:
        self._create = create
        self._unfinished = unfinished
        self._tail: list[bytearray | memoryview] = []
        self._tail_size = 0
        self._file: PayloadFile | None = None

    def add(self, data: bytes | memoryview) -> None:
        """Append data, in memory; `spill` moves it to the disk."""
        self._tail_size += len(data)
        if len(data) >= _MIN_UNCOPIED:
            self._tail.append(memoryview(data))
        elif self._tail and isinstance(last := self._tail[-1], bytearray):
            last += data
        else:
            self._tail.append(bytearray(data))

    async def spill(self) -> None:
        """Write the data in memory to the file if it exceeds 1 MiB; raise a `DiskError` if that fails."""
        if self._tail_size > MAX_IN_MEMORY:
            await self._write()

    async def finish(self) -> Payload:
        """Return the whole payload: bytes, or the file with the rest written to it."""
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
        """Delete the file, if there is one."""
        if self._file is not None:
            self._file.discard()


def refusal(error: IncomingFullError) -> HttpError:
    """Return the answer to a client whose input exceeds the budget: 429 for its address, else 503."""
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


def _too_large(limit: int, clause: str) -> HttpError:
    return HttpError(
        413,
        f"The request is larger than {format_size(limit)}, the most {clause}. Does the block refer to a "
        "large object, such as a dataset or another model? Refer only to the parts that it needs.",
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
