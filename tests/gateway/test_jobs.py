"""`GET /requests/{id}`: error and stored result of a user's own jobs, and answers without the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ndif.gateway import jobs as jobs_module
from ndif.stores.objects import FileStore, ObjectStoreError
from ndif.stores.objects.port import end_key, update_key
from ndif.stores.responder import StoredResponse
from tests.dashboard.sample import (
    DONE,
    ERROR,
    FAILED,
    FETCHED,
    KEY,
    RUNNING,
    USER,
    WAITING,
    Laboratory,
    served,
)

NOTHING = (None, False)


@pytest.fixture
def laboratory() -> Laboratory:
    return Laboratory()


@pytest.fixture
def url(laboratory: Laboratory, tmp_path: Path) -> Iterator[str]:
    with served(laboratory, tmp_path) as base_url:
        yield base_url


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}/{path}", headers={"ndif-api-key": KEY}, trust_env=False)


def left(url: str, job: str) -> tuple[str | None, bool | None]:
    """Return the error and the stored flag in the trace of a job."""
    trace = get(url, f"requests/{job}").json()
    assert trace["id"] == job
    assert trace["steps"]
    assert "user" not in trace
    return trace["error"], trace["stored"]


def test_trace_reports_error_and_stored_result_of_job(url: str, laboratory: Laboratory) -> None:
    jobs = (RUNNING, WAITING, DONE, FETCHED, FAILED)
    assert [left(url, job) for job in jobs] == [
        NOTHING,
        NOTHING,
        (None, True),
        NOTHING,
        (ERROR, False),
    ]
    job = next(job for job in laboratory.jobs if job["id"] == DONE)
    job["ended"] = time.time() - 3601  # results are kept for an hour
    assert left(url, DONE) == NOTHING


def test_trace_reports_error_of_job_with_lost_process(url: str, laboratory: Laboratory) -> None:
    failed = next(job for job in laboratory.jobs if job["id"] == FAILED)
    failed["status"] = "ENDED"
    assert left(url, FAILED) == (ERROR, False)


def test_stored_update_is_not_reported_as_end(url: str, tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    (stored / end_key(DONE)).unlink()
    path = stored / update_key(DONE)
    path.parent.mkdir()
    fields = {"id": DONE, "status": "RUNNING", "description": "It runs."}
    path.write_bytes(StoredResponse(fields, USER).encode())
    assert left(url, DONE) == NOTHING


@pytest.mark.parametrize("user", ["bob@example.org", ""])
def test_stored_end_of_another_user_is_ignored(url: str, tmp_path: Path, user: str) -> None:
    for job in (DONE, FAILED):
        path = tmp_path / "stored" / end_key(job)
        kept = StoredResponse.decode(path.read_bytes())
        path.write_bytes(StoredResponse(kept.fields, user).encode())
        assert left(url, job) == NOTHING


def test_job_of_another_user_is_not_found(url: str, laboratory: Laboratory) -> None:
    for job in laboratory.jobs:
        job["user"] = "bob@example.org"
    for job in (RUNNING, DONE, FAILED):
        assert get(url, f"requests/{job}").status_code == 404


async def is_away(self: FileStore, key: str) -> bytes | None:
    raise ObjectStoreError("the object store at http://10.0.0.1 cannot be reached: no route")


async def is_silent(self: FileStore, key: str) -> bytes | None:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("get_", [is_away, is_silent])
def test_trace_shows_steps_without_object_store(
    url: str, monkeypatch: pytest.MonkeyPatch, get_: Any
) -> None:
    monkeypatch.setattr(jobs_module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(FileStore, "get", get_)
    for job in (DONE, FETCHED, FAILED):
        assert left(url, job) == (None, None)
    assert left(url, RUNNING) == NOTHING
    # The list does not read the store.
    assert len(get(url, "requests").json()["requests"]) == 5
