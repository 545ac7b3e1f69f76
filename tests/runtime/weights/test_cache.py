"""The selection of repositories to evict from a full cache, and their deletion from a real one."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from ndif.runtime.weights import cache
from ndif.runtime.weights.cache import (
    CachedRepository,
    CacheRules,
    CacheState,
    NoSpaceError,
    delete,
    delete_parts,
    folder_of,
    hub_cache,
    in_use,
    make_room,
    record_download,
    record_use,
    scan,
)
from tests.conftest import NAME, WIDE
from tests.waiting import until

GB = 10**9
NEW = "a/new"


def repository(
    name: str, size: int, last_used: float, *, in_use: bool = False, coming: int = 0
) -> CachedRepository:
    return CachedRepository(name, size * GB, last_used, (), in_use, coming * GB)


OLD, MIDDLE, YOUNG = (repository(f"a/{n}", 30, t) for t, n in enumerate(("old", "middle", "young")))
LOADED = repository("a/loaded", 30, 0, in_use=True)
ARRIVES = repository("a/arrives", 10, 9, in_use=True, coming=20)


def state(
    *repositories: CachedRepository,
    free: int,
    limit: int | None = None,
    protected: Sequence[str] = (),
) -> CacheState:
    bytes_ = None if limit is None else limit * GB
    return CacheState(Path("/hub"), repositories, free * GB, bytes_, frozenset(protected))


@pytest.mark.parametrize(
    ("now", "missing", "deleted"),
    [
        (state(OLD, free=50), 50, []),
        (state(OLD, free=50, limit=80), 50, []),
        # One byte too many for the limit, or for the disk.
        (state(YOUNG, OLD, MIDDLE, free=500, limit=119), 30, [OLD]),
        (state(YOUNG, OLD, MIDDLE, free=29, limit=900), 30, [OLD]),
        (state(YOUNG, OLD, MIDDLE, free=0, limit=900), 60, [OLD, MIDDLE]),
        (state(YOUNG, OLD, MIDDLE, free=500, limit=30), 30, [OLD, MIDDLE, YOUNG]),
        # Names are compared case-insensitively, as on the hub.
        (state(OLD, MIDDLE, free=500, limit=60, protected=["a/old"]), 30, [MIDDLE]),
        (state(LOADED, OLD, MIDDLE, free=500, limit=90), 30, [OLD]),
        # Space that another download needs is reserved.
        (state(ARRIVES, OLD, free=50, limit=900), 30, []),
        (state(ARRIVES, OLD, free=49, limit=900), 30, [OLD]),
        (state(ARRIVES, OLD, free=900, limit=89), 30, [OLD]),
        # Other files of the repository itself stay.
        (state(repository(NEW, 30, 0), OLD, free=500, limit=60), 30, [OLD]),
    ],
)
def test_least_recently_used_repositories_are_evicted_until_new_one_fits(
    now: CacheState, missing: int, deleted: list[CachedRepository]
) -> None:
    assert now.select_deletions(NEW, missing * GB) == deleted


@pytest.mark.parametrize(
    ("now", "missing", "why"),
    [
        (state(OLD, free=90), 140, "needs 140GB, and 90GB are free on this machine's disk (/hub)."),
        # Without a limit, nothing is deleted.
        (state(OLD, free=20), 30, "needs 30GB, and 20GB are free on this machine's disk (/hub)."),
        (
            state(OLD, LOADED, free=10, limit=900),
            50,
            "needs 50GB, and 10GB are free on this machine's disk (/hub), and its cache has 30GB of "
            "unused models.",
        ),
        (
            state(OLD, LOADED, free=900, limit=50),
            30,
            "needs 30GB, and the cache of models may have 50GB (NDIF_CACHE_BYTES), of which 30GB are "
            "deployed, booked or in use.",
        ),
        (
            state(OLD, free=900, limit=50, protected=["a/old"]),
            30,
            "needs 30GB, and the cache of models may have 50GB (NDIF_CACHE_BYTES), of which 30GB are "
            "deployed, booked or in use.",
        ),
        (
            state(ARRIVES, free=40),
            30,
            "needs 30GB, and 20GB are free on this machine's disk (/hub).",
        ),
    ],
)
def test_refusal_states_needed_and_available_space(now: CacheState, missing: int, why: str) -> None:
    with pytest.raises(NoSpaceError) as refused:
        now.select_deletions(NEW, missing * GB)
    assert str(refused.value).startswith(f"'{NEW}' {why} `ndif cache list` shows ")


@pytest.mark.parametrize(
    ("size", "chosen"), [(-5, []), (0, []), (1, [OLD]), (31, [OLD, MIDDLE]), (999, [OLD, MIDDLE])]
)
def test_oldest_selects_no_more_repositories_than_needed(
    size: int, chosen: list[CachedRepository]
) -> None:
    now = state(MIDDLE, LOADED, OLD, YOUNG, free=0, protected=["a/young"])
    assert now.oldest(size * GB) == chosen


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/y", "XDG_CACHE_HOME": "/x"}, "/y/hub"),
        ({"HF_HUB_CACHE": "/z", "HF_HOME": "/y"}, "/z"),
    ],
)
def test_cache_folder_follows_huggingface_variables(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == Path(folder).expanduser()


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory, hub_url: str) -> Path:
    """A cache that holds two models with the same commit."""
    folder = tmp_path_factory.mktemp("filled")
    for name in (NAME, WIDE):
        snapshot_download(name, endpoint=hub_url, cache_dir=folder)
    return folder


@pytest.fixture
def real(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's cache, in which NAME was used last."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(filled, tmp_path / "hub", symlinks=True)
    for name in (WIDE, NAME):
        with in_use(name):
            pass
    # Both uses may fall into one tick of the file system's clock.
    (mark,) = tmp_path.rglob(f".locks/ndif/{folder_of(WIDE).name}")
    os.utime(mark, (mark.stat().st_atime, mark.stat().st_mtime - 1))
    return tmp_path / "hub"


def repositories_by_name() -> dict[str, CachedRepository]:
    return {entry.name: entry for entry in scan(CacheRules()).repositories}


def test_look_reports_repositories_sizes_and_limit(
    real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = scan(CacheRules(0.5, (NAME.upper(),)))
    assert now.limit_bytes == shutil.disk_usage(real).total // 2
    first, other = repositories_by_name()[NAME], repositories_by_name()[WIDE]
    size = sum(file.stat().st_size for file in folder_of(NAME).glob("blobs/*"))
    assert first.size_bytes == other.size_bytes == size
    assert first.revisions == other.revisions
    assert len(first.revisions[0]) == 40
    assert first.last_used > other.last_used
    assert [now.is_deletable(entry) for entry in now.repositories] == [False, True]
    monkeypatch.setenv("HF_HUB_CACHE", str(real / "nothing" / "yet"))
    assert scan(CacheRules()).repositories == ()


def test_last_use_is_recorded(real: Path) -> None:
    for file in real.rglob("*"):
        os.utime(file, (1, 1), follow_symlinks=False)
    assert repositories_by_name()[WIDE].last_used == 1
    record_use(WIDE)
    assert repositories_by_name()[WIDE].last_used > 1
    # Without a recorded use, the newest file counts.
    shutil.rmtree(real / ".locks")
    newest = max(file.stat().st_mtime for file in folder_of(NAME).glob("blobs/*"))
    assert repositories_by_name()[NAME].last_used == newest


def test_delete_removes_only_one_repository(real: Path) -> None:
    assert delete(WIDE)
    assert [*repositories_by_name()] == [NAME]
    snapshot_download(NAME, cache_dir=real, local_files_only=True)
    assert not (real / folder_of(WIDE).name).exists()


def test_repository_in_use_is_not_deleted(real: Path) -> None:
    with in_use(NAME), in_use(NAME):
        assert repositories_by_name()[NAME].in_use
        assert not delete(NAME)
    # A lock of another program that downloads the repository.
    lock = real / ".locks" / folder_of(NAME).name / "0123.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert repositories_by_name()[NAME].in_use
    assert not repositories_by_name()[NAME].in_use
    assert delete(NAME)


def test_use_waits_for_running_deletion(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on, used = threading.Event(), threading.Event(), threading.Event()
    scan = cache._scan

    def slow() -> object:
        began.set()
        goes_on.wait()
        return scan()

    def use() -> None:
        with in_use(NAME):
            used.set()
            existed.append(folder_of(NAME).exists())

    existed: list[bool] = []
    monkeypatch.setattr(cache, "_scan", slow)
    deleting = threading.Thread(target=delete, args=(NAME,))
    deleting.start()
    began.wait()
    using = threading.Thread(target=use)
    using.start()
    waiting = re.compile(rf"-> FLOCK .* {os.getpid()} ")
    until(lambda: waiting.search(Path("/proc/locks").read_text()))
    assert not used.is_set()
    goes_on.set()
    deleting.join()
    using.join()
    assert existed == [False]


def test_partial_files_of_killed_download_are_counted_and_deleted(real: Path) -> None:
    whole = repositories_by_name()[NAME].size_bytes
    part, arriving = (folder_of(NAME) / "blobs" / f"{n}.cafe.incomplete" for n in ("01", "02"))
    part.write_bytes(bytes(1000))
    arriving.write_bytes(bytes(100))
    lock = real / ".locks" / folder_of(NAME).name / "02.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert repositories_by_name()[NAME].size_bytes == whole + 1100
        delete_parts()
        assert [part.exists(), arriving.exists()] == [False, True]
    # The remains of a download that was killed at its first file.
    folder = folder_of("a/part") / "blobs"
    folder.mkdir(parents=True)
    (folder / "01.cafe.incomplete").write_bytes(bytes(1000))
    assert repositories_by_name()["a/part"].size_bytes >= 1000
    assert delete("a/part")


def test_make_room_evicts_and_reserves_space(real: Path) -> None:
    size = repositories_by_name()[NAME].size_bytes
    rules = CacheRules(2 * size + 10, (NAME,))
    with in_use("a/first"):
        assert make_room("a/first", 10, rules) == []
        folder_of("a/first").mkdir()
        assert repositories_by_name()["a/first"].coming_bytes == 10
        # Another replica's download of the same files needs no additional space.
        assert make_room("a/first", 10, rules) == []
        with in_use("a/second"):
            assert make_room("a/second", 10, rules) == [WIDE]
        record_download("a/first", None)
        assert repositories_by_name()["a/first"].coming_bytes == 0
    with pytest.raises(NoSpaceError, match=r"NDIF_CACHE_BYTES"):
        make_room("a/third", 10 + 2 * size, rules)
    assert NAME in repositories_by_name()


def test_unwritable_cache_is_used_without_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with in_use(NAME):
        record_download(NAME, 5)
