"""`ndif jobs result`: a stored result is written completely or not at all."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zstandard

from ndif.stores.objects.port import result_key
from tests.cli.operations import OPERATORS, TOKEN
from tests.cli.test_commands import Result, error, invoke
from tests.commands import NDIF
from tests.dashboard.sample import DONE, FAILED, FETCHED, KEY, RESULT, Laboratory, served

Download = Callable[..., Result]
COMPRESSED = zstandard.ZstdCompressor(level=1, threads=2, write_checksum=True).compress(RESULT)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with served(Laboratory(), tmp_path) as base_url:
        yield base_url


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "downloaded" / "result.pt"


@pytest.fixture
def download(url: str, tmp_path: Path, file: Path) -> Download:
    """Run `ndif jobs result` for a job with this stored content."""
    file.parent.mkdir()

    def run(content: bytes, job: str = DONE, *more: str) -> Result:
        (tmp_path / "stored" / result_key(DONE)).write_bytes(content)
        return invoke("jobs", "result", job, "-o", file, "--key", KEY, "--url", url, *more)

    return run


def test_result_file_is_readable_by_torch(download: Download, file: Path) -> None:
    result = download(COMPRESSED, DONE[:6])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"The result of job {DONE} is in {file} (2.9MiB).\n"
    assert file.read_bytes() == RESULT
    saved = file.with_name("saved.pt")
    torch.save({"logits": torch.ones(100)}, saved)
    content = zstandard.ZstdCompressor().compress(saved.read_bytes())
    answer = json.loads(download(content, DONE, "--json").stdout)
    assert answer == {"id": DONE, "file": str(file), "bytes": saved.stat().st_size}
    assert torch.load(file)["logits"].sum() == 100


@pytest.mark.parametrize("content", [RESULT, RESULT[:4096], b"PK"], ids=len)
def test_uncompressed_result_is_written_unchanged(
    download: Download, file: Path, content: bytes
) -> None:
    assert download(content).exit_code == 0
    assert file.read_bytes() == content


def test_every_zstd_frame_is_written(download: Download, file: Path) -> None:
    pieces = [RESULT[:1], b"", RESULT[1:70_000], RESULT[70_000:]]
    frames = b"".join(zstandard.ZstdCompressor().compress(piece) for piece in pieces)
    assert download(frames).exit_code == 0
    assert file.read_bytes() == RESULT


@pytest.mark.parametrize("size", [3, 4, 5, len(COMPRESSED) // 2, len(COMPRESSED) - 1])
@pytest.mark.parametrize("before", [b"", COMPRESSED], ids=["first", "second"])
def test_truncated_result_is_not_written(
    download: Download, file: Path, before: bytes, size: int
) -> None:
    file.write_text("an earlier download")
    message = error(download(before + COMPRESSED[:size]), 1)
    assert "The result is truncated" in message
    assert file.read_text() == "an earlier download"
    assert [*file.parent.iterdir()] == [file]


def test_empty_result_is_not_written(download: Download, file: Path) -> None:
    """Use a stored file that a power loss left empty."""
    assert "The result is truncated" in error(download(b""), 1)
    assert [*file.parent.iterdir()] == []


@pytest.mark.parametrize(
    "content",
    [
        COMPRESSED + b"and more",
        COMPRESSED[:-1] + bytes([COMPRESSED[-1] ^ 1]),
        COMPRESSED[:4] + b"\xff" * 40,
    ],
    ids=["trailing", "checksum", "header"],
)
def test_damaged_result_is_not_written(download: Download, file: Path, content: bytes) -> None:
    assert "The result is damaged" in error(download(content), 1)
    assert [*file.parent.iterdir()] == []


def test_expired_result_is_not_written(
    download: Download, tmp_path: Path, file: Path, url: str
) -> None:
    download(COMPRESSED)
    file.unlink()
    (tmp_path / "stored" / result_key(DONE)).unlink()
    ran = invoke("jobs", "result", DONE, "-o", file, "--key", KEY, "--url", url)
    assert "HTTP 404" in error(ran, 1)
    assert [*file.parent.iterdir()] == []


def test_job_without_stored_result_reports_reason(download: Download, file: Path) -> None:
    assert "IndexError" in error(download(COMPRESSED, FAILED), 1)
    assert "blocking=False" in error(download(COMPRESSED, FETCHED), 1)
    assert [*file.parent.iterdir()] == []


def test_operator_token_cannot_read_results_of_users(tmp_path: Path, file: Path) -> None:
    with served(Laboratory(), tmp_path, operators=OPERATORS) as url:
        ran = invoke("jobs", "result", DONE[:6], "-o", file, "--url", url, "--token", TOKEN)
    message = error(ran, 5)
    assert f"Only its user can download the result of job {DONE}" in message
    assert "--key" in message
    assert "nnsight" not in message


@pytest.mark.process
def test_large_result_is_written_with_little_memory(
    download: Download, url: str, tmp_path: Path, file: Path
) -> None:
    """Use zeros, which zstd compresses 30,000 to 1."""
    size = 1 << 30
    assert download(b"PK").exit_code == 0
    content = zstandard.ZstdCompressor().compress(bytes(size))
    (tmp_path / "stored" / result_key(DONE)).write_bytes(content)
    subprocess.run(
        [
            *("prlimit", f"--as={size}", NDIF, "jobs", "result", DONE),
            *("-o", file, "--key", KEY, "--url", url),
        ],
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        check=True,
        capture_output=True,
    )
    assert file.stat().st_size == size
    file.unlink()
