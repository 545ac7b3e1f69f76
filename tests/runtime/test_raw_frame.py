"""zstd frames of raw blocks, read by the clients' decoders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import zstandard

from ndif.runtime.raw_frame import RawFrame
from tests.fuzzing import dice

BLOCK = 1 << 17


def framed(pieces: Sequence[bytes], size: int | None = None) -> bytes:
    out: list[Any] = []
    frame = RawFrame(out.extend, sum(map(len, pieces)) if size is None else size)
    for piece in pieces:
        frame.write(piece)
    frame.finish()
    return b"".join(out)


@pytest.mark.parametrize(
    "sizes",
    [
        [0],
        [1],
        [BLOCK - 1],
        [BLOCK],
        [BLOCK + 1],
        [10, 2 * BLOCK, 10],
        [30_000] * 20,
        # More blocks than one system call accepts.
        [7, 600 * BLOCK, 7],
    ],
)
def test_every_decoder_reads_a_frame(sizes: list[int]) -> None:
    pieces = [os.urandom(size) for size in sizes]
    content = b"".join(pieces)
    frame = framed(pieces)
    assert zstandard.get_frame_parameters(frame).content_size == len(content)
    assert zstandard.ZstdDecompressor().decompress(frame) == content
    with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
        assert reader.read() == content
    assert len(frame) <= len(content) + 20 + 3 * (len(content) // BLOCK + len(sizes))


def test_writes_of_mixed_sizes_form_one_content() -> None:
    sizes = dice().choices((1, 100, 4096, BLOCK - 1, BLOCK, 3 * BLOCK + 5), k=100)
    pieces = [os.urandom(size) for size in sizes]
    assert zstandard.ZstdDecompressor().decompress(framed(pieces)) == b"".join(pieces)


def test_large_buffers_are_not_copied() -> None:
    content = bytes(4 * BLOCK)
    out: list[Any] = []
    RawFrame(out.extend, len(content)).write(content)
    assert [part.obj is content for part in out if isinstance(part, memoryview)] == [True] * 4


@pytest.mark.parametrize(("size", "match"), [(5, "more bytes than"), (7, "1 bytes .* are missing")])
def test_frame_with_wrong_declared_size_is_an_error(size: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        framed([b"123456"], size)
