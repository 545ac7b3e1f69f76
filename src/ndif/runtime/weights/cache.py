"""The Hub's cache of this machine: its repositories, their last use, and deletions to make room.

A process that uses a repository holds a shared lock on a file, the repository's mark. A deletion needs an
exclusive lock. The mark's mtime is the last use, because a file system may not record access times.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ndif.runtime.tracebacks import UserFacingError
from ndif.sizes import format_size

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

_KIND = "models--"
_ADVICE = (
    "`ndif cache list` shows the cached models, and `ndif cache prune --to SIZE` deletes unused ones. "
    "Or set HF_HOME to a folder on a larger disk."
)


class NoSpaceError(UserFacingError):
    """There is too little space for a model; the message is the reason."""


@dataclass(frozen=True, slots=True)
class CacheRules:
    """An operator's rules for the cache of a machine."""

    limit: int | float | None = None
    """Bytes, or a fraction of the disk; with None there is no limit, and nothing is deleted."""
    protected: tuple[str, ...] = ()
    """Names of repositories that are never deleted: they are deployed or booked."""


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """A model's repository in the cache."""

    name: str
    size_bytes: int
    last_used: float
    revisions: tuple[str, ...] = ()
    in_use: bool = False
    """True if a process downloads the repository, or has it loaded."""
    coming_bytes: int = 0
    """Bytes that a running download will still add."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """A snapshot of the cache, its free space and its protected names.

    It chooses repositories to delete, but deletes none.
    """

    folder: Path
    repositories: tuple[CachedRepository, ...]
    free_bytes: int
    limit_bytes: int | None = None
    protected: frozenset[str] = frozenset()
    """Names in lower case."""

    @property
    def total_bytes(self) -> int:
        """Return the size of all repositories."""
        return sum(repository.size_bytes for repository in self.repositories)

    def is_deletable(self, repository: CachedRepository) -> bool:
        """Return True if a repository may be deleted."""
        return not repository.in_use and repository.name.lower() not in self.protected

    def oldest(self, size_bytes: int) -> list[CachedRepository]:
        """Return the least recently used deletable repositories that together have `size_bytes`, or all."""
        chosen: list[CachedRepository] = []
        for repository in sorted(
            filter(self.is_deletable, self.repositories), key=lambda repo: repo.last_used
        ):
            if sum(repo.size_bytes for repo in chosen) >= size_bytes:
                break
            chosen.append(repository)
        return chosen

    def select_deletions(self, name: str, missing: int) -> list[CachedRepository]:
        """Return repositories to delete before `name` grows by `missing` bytes, or raise NoSpaceError."""
        others = tuple(repository for repository in self.repositories if repository.name != name)
        coming = sum(repository.coming_bytes for repository in others)
        free = max(0, self.free_bytes - coming)
        excess, chosen = missing - free, list[CachedRepository]()
        if self.limit_bytes is not None:
            excess = max(excess, self.total_bytes + coming + missing - self.limit_bytes)
            chosen = replace(self, repositories=others).oldest(excess)
        freed = sum(repository.size_bytes for repository in chosen)
        if freed >= excess:
            return chosen
        reason = f"{format_size(free)} are free on this machine's disk ({self.folder})"
        if freed:
            reason += f", and its cache has {format_size(freed)} of unused models"
        if self.limit_bytes is not None and missing <= free + freed:
            kept = format_size(self.total_bytes + coming - freed)
            reason = (
                f"the cache of models may have {format_size(self.limit_bytes)} (NDIF_CACHE_BYTES), of "
                f"which {kept} are deployed, booked or in use"
            )
        raise NoSpaceError(f"{name!r} needs {format_size(missing)}, and {reason}. {_ADVICE}")


def make_room(name: str, missing: int, rules: CacheRules) -> list[str]:
    """Delete repositories until `missing` bytes of `name` fit; return the deleted names.

    The bytes stay reserved until `record_download(name, None)`, or until the mark's lock is released.

    Raises:
        NoSpaceError: If not enough bytes can be freed.
    """
    with locked():
        delete_parts()
        state = scan(rules)
        size, coming = next(
            (
                (repository.size_bytes, repository.coming_bytes)
                for repository in state.repositories
                if repository.name == name
            ),
            (0, 0),
        )
        if coming:  # another process downloads the same files
            missing = min(missing, coming)
        deleted = [
            repository.name
            for repository in state.select_deletions(name, missing)
            if delete(repository.name)
        ]
        if deleted:
            # Check again: repositories may share files, and deletions may then free less than their sizes.
            replace(scan(rules), limit_bytes=None).select_deletions(name, missing)
        record_download(name, size + missing)
    return deleted


def scan(rules: CacheRules) -> CacheState:
    """Return the state of this machine's cache."""
    cache = hub_cache()
    disk = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists()))
    limit = int(rules.limit * disk.total) if isinstance(rules.limit, float) else rules.limit
    repos = {} if not cache.is_dir() else {repo.repo_path.name: repo for repo in _scan().repos}
    return CacheState(
        cache,
        tuple(_inspect(path, repos.get(path.name)) for path in sorted(cache.glob(f"{_KIND}*"))),
        disk.free,
        limit,
        frozenset(name.lower() for name in rules.protected),
    )


def _inspect(path: Path, repo: CachedRepoInfo | None) -> CachedRepository:
    """Return the state of one repository; `repo` is None after a killed download or deletion."""
    name = path.name.removeprefix(_KIND).replace("--", "/")
    mark, locks = _mark(name), path.parent / ".locks" / path.name
    size, last_used, coming = 0, path.stat().st_mtime, 0
    for file in path.glob("blobs/*.incomplete") if repo is not None else path.rglob("*"):
        with contextlib.suppress(OSError):  # another process has deleted the file
            size += file.lstat().st_size
    if repo is not None:
        size, last_used = size + repo.size_on_disk, repo.last_modified
    is_used = _is_held(mark, fcntl.LOCK_EX)
    with contextlib.suppress(OSError, ValueError):  # there is no mark, or the mark is empty
        last_used = max(last_used, mark.stat().st_mtime)
        coming = max(0, int(mark.read_text()) - size) if is_used else 0
    # Downloads by other programs hold a lock of huggingface_hub.
    is_used = is_used or any(_is_held(lock, fcntl.LOCK_SH) for lock in locks.glob("*.lock"))
    revisions = (
        sorted(revision.commit_hash for revision in repo.revisions) if repo is not None else ()
    )
    return CachedRepository(name, size, last_used, tuple(revisions), is_used, coming)


def delete(name: str) -> bool:
    """Delete a repository; return False if a process uses it, or this user lacks permission."""
    path = folder_of(name)
    with _opened(_mark(name)) as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        cache_info = _scan()
        for repo in cache_info.repos:
            if repo.repo_path == path:
                # Only this repository: a copy of it may have the same commits.
                single = replace(cache_info, repos=frozenset({repo}))
                single.delete_revisions(
                    *(revision.commit_hash for revision in repo.revisions)
                ).execute()
        shutil.rmtree(
            path, ignore_errors=True
        )  # for a partial repository, which the library ignores
    return not path.exists()


def delete_parts() -> None:
    """Delete the partial files of killed downloads, which no later download resumes."""
    for part in hub_cache().glob(f"{_KIND}*/blobs/*.*.incomplete"):
        repository = part.parent.parent
        etag = part.name.partition(".")[0]
        if not _is_held(
            repository.parent / ".locks" / repository.name / f"{etag}.lock", fcntl.LOCK_SH
        ):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def in_use(name: str) -> Iterator[None]:
    """Prevent the deletion of a repository while the context lasts; wait for a running deletion.

    A read-only cache has no marks, and nothing in it is deleted.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ValueError):
            mark = held.enter_context(_opened(_mark(name)))
            fcntl.flock(mark, fcntl.LOCK_SH)
            held.callback(record_use, name)
        record_use(name)
        yield


def record_use(name: str) -> None:
    """Record the present time as the last use of a repository."""
    with contextlib.suppress(OSError, ValueError):
        os.utime(_mark(name))


def record_download(name: str, size_bytes: int | None) -> None:
    """Record the size that a repository will have after its download; None after the download."""
    with contextlib.suppress(OSError, ValueError):
        _mark(name).write_text("" if size_bytes is None else str(size_bytes))


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold this machine's lock for decisions about the cache while the context lasts."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            fcntl.flock(held.enter_context(_opened(_mark(""))), fcntl.LOCK_EX)
        yield


def hub_cache() -> Path:
    """Return the folder of the cache, from the present environment: huggingface_hub reads it only once."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    legacy = os.environ.get("HUGGINGFACE_HUB_CACHE", f"{os.environ.get('HF_HOME', default)}/hub")
    named = os.path.expandvars(os.environ.get("HF_HUB_CACHE", legacy))
    return Path(named).expanduser().resolve()


def _scan() -> HFCacheInfo:
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir(hub_cache())


def folder_of(name: str) -> Path:
    """Return the folder of a repository."""
    return hub_cache() / f"{_KIND}{name.replace('/', '--')}"


def _mark(name: str) -> Path:
    """Return the mark of a repository, in a folder that huggingface_hub ignores."""
    return hub_cache() / ".locks" / "ndif" / folder_of(name).name


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    """Open a file for a lock; create it if necessary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_held(file: Path, operation: int) -> bool:
    """Return True if a lock of this kind is not available now."""
    if not file.exists():
        return False
    try:
        with _opened(file) as descriptor:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
