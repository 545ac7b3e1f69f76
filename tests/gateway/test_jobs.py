"""A user's own jobs: which results are said to be stored, who has errors and results, and in what form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zstandard

from ndif.stores.objects import ObjectStoreError
from ndif.stores.objects.files import FileStore
from ndif.stores.objects.port import end_key, result_key
from tests.dashboard.sample import (
    DONE,
    ERROR,
    FAILED,
    FETCHED,
    KEY,
    RESULT,
    RUNNING,
    Laboratory,
    served,
)

AS_ADA = {"ndif-api-key": KEY}


@pytest.fixture
def laboratory() -> Laboratory:
    return Laboratory()


@pytest.fixture
def url(laboratory: Laboratory, tmp_path: Path) -> Iterator[str]:
    with served(laboratory, tmp_path) as found:
        yield found


def stored_of(url: str) -> dict[str, bool | None]:
    jobs = httpx.get(f"{url}/requests", headers=AS_ADA, verify=False).json()["requests"]
    return {job["id"]: job["stored"] for job in jobs if "stored" in job}


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}/requests/{path}", headers=AS_ADA, verify=False)


def test_a_result_is_stored_for_a_job_that_was_polled_for(
    url: str, laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored_of(url) == {DONE: True, FETCHED: False, FAILED: False}
    done = next(job for job in laboratory.jobs if job["id"] == DONE)
    done["ended"] = time.time() - 3601  # results are kept for an hour
    assert stored_of(url)[DONE] is False

    async def away(self: FileStore, key: str) -> bytes | None:
        raise ObjectStoreError("the store is away")

    done["ended"] = time.time()
    monkeypatch.setattr(FileStore, "get", away)
    assert stored_of(url)[DONE] is None


def test_a_result_is_sent_as_torch_reads_it(url: str, tmp_path: Path) -> None:
    answer = get(url, f"{DONE}/result")
    assert answer.content == RESULT
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{DONE}.pt"'
    # Clients that send no compressed requests have results that are not compressed either.
    (tmp_path / "stored" / result_key(DONE)).write_bytes(RESULT[:100])
    assert get(url, f"{DONE}/result").content == RESULT[:100]
    (tmp_path / "stored" / result_key(DONE)).unlink()
    for job in (DONE, FETCHED, FAILED, RUNNING):
        refused = get(url, f"{job}/result")
        assert refused.status_code == 404
        assert "for 1h." in refused.json()["detail"]


def test_a_large_result_is_never_whole_in_memory(url: str, tmp_path: Path) -> None:
    size = 1 << 28
    path = tmp_path / "stored" / result_key(DONE)
    with (
        path.open("wb") as file,
        zstandard.ZstdCompressor().stream_writer(file, size=size) as writer,
    ):
        for _ in range(size >> 20):
            writer.write(bytes(1 << 20))
    peak = _peak_bytes()
    at = f"{url}/requests/{DONE}/result"
    with httpx.stream("GET", at, headers=AS_ADA, verify=False) as answer:
        assert sum(len(piece) for piece in answer.iter_raw()) == size
    assert _peak_bytes() - peak < size // 4


def _peak_bytes() -> int:
    """The most memory that this process, in which the server is, has ever had."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_a_failed_job_says_why_to_its_user_alone(url: str, tmp_path: Path) -> None:
    assert get(url, FAILED).json()["error"] == ERROR
    assert get(url, DONE).json()["error"] is None
    assert get(url, FETCHED).json()["error"] is None
    end = tmp_path / "stored" / end_key(FAILED)
    end.write_text(end.read_text().replace("ada@example.org", "bob@example.org"))
    assert get(url, FAILED).json()["error"] is None
