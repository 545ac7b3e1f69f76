"""Reads a multipart body as it streams in, into memory and no further than a limit."""

from __future__ import annotations

from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

_MAX_HEADER = 16 * 1024
_MAX_PARTS = 16
"""A client sends two. Each costs more memory than its bytes, which are what the limit counts."""


class Malformed(ValueError):  # noqa: N818 - it is what the body is
    """The body is not multipart, or has no end."""


class Parts:
    """The named parts of one body."""

    def __init__(self, content_type: str) -> None:
        """Prepare to read.

        Raises:
            Malformed: if the content type names no boundary, or one that cannot be.
        """
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise Malformed("its Content-Type names no boundary")
        self.content: dict[str, bytearray] = {}
        self._part = bytearray()
        self._field = self._value = b""
        self._header_size = 0
        self._ended = False
        self._count = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_part_data": self._data,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise Malformed(str(error)) from error

    async def read(self, chunks: AsyncIterator[bytes]) -> dict[str, bytearray]:
        """The parts by name, once the body has come whole.

        Raises:
            Malformed: if it is not multipart or ends early.
        """
        try:
            async for chunk in chunks:
                self._parser.write(chunk)
            self._parser.finalize()
        except MultipartParseError as error:
            raise Malformed(str(error)) from error
        if not self._ended:
            raise Malformed("it ends before its last boundary")
        return self.content

    def _begin(self) -> None:
        self._part = bytearray()
        self._header_size = 0
        self._count += 1
        if self._count > _MAX_PARTS:
            raise MultipartParseError(f"it has more than {_MAX_PARTS} parts")

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._part += memoryview(data)[start:end]

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._bound(end - start)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._bound(end - start)

    def _bound(self, size: int) -> None:
        self._header_size += size
        if self._header_size > _MAX_HEADER:
            raise MultipartParseError("a part's headers are too long")

    def _header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self.content[options.get(b"name", b"").decode("latin-1")] = self._part
        self._field = self._value = b""

    def _end(self) -> None:
        self._ended = True
