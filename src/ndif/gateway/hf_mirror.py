"""The read-only Hugging Face routes: what a client needs to build its model without the Hub.

A client reaches them with `HF_ENDPOINT=http://HOST:PORT/hub`.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ndif.host.snapshot import Snapshot, look

_HASHED_BYTES = 64 << 20
"""A larger file is told apart by its size and time: reading it all would keep clients waiting."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class HubModel:
    """A model whose files are answered."""

    repo_id: str
    source: Path | Snapshot
    """A snapshot in a Hugging Face cache, a plain folder, or what another machine has sent of one."""
    revision: str | None
    task: str | None

    def look(self, *, share_weights: bool) -> Snapshot:
        """What of it is shared."""
        if isinstance(self.source, Snapshot):
            return self.source
        return look(self.source, self.revision, share_weights=share_weights)


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    etag: str


@dataclass(frozen=True)
class _Listing:
    commit: str
    is_whole: bool
    """Whether what is not in the folder is not in the commit either."""
    files: dict[str, _File]
    withheld: frozenset[str]


class _Absence(Exception):  # noqa: N818 - it is no error of ours
    """What is not here, in the form in which huggingface_hub tells its errors apart."""

    def __init__(self, code: str, message: str, commit: str | None = None) -> None:
        super().__init__(message)
        in_header = message.encode("ascii", "backslashreplace").decode()
        self._headers = {"X-Error-Code": code, "X-Error-Message": in_header}
        if commit is not None:
            self._headers["X-Repo-Commit"] = commit

    def response(self) -> Response:
        return JSONResponse({"error": str(self)}, 404, self._headers)


class _HubFile(FileResponse):
    chunk_size = _CHUNK_BYTES


class Hub:
    """The models of this server, as a Hugging Face Hub would answer for them."""

    def __init__(self, *, share_weights: bool) -> None:
        self._share_weights = share_weights
        self._repositories: dict[str, _Repository] = {}

    def serve(self, model: HubModel) -> None:
        """Answer for `model` from now on; one of the same name is replaced."""
        repository = _Repository(model, share_weights=self._share_weights)
        self._repositories[model.repo_id.casefold()] = repository

    def routes(self) -> list[BaseRoute]:
        """Where it answers, below the endpoint that clients are given."""
        routes: list[BaseRoute] = []
        # Threads run plain functions, and here files are read.
        info, tree, resolve = map(_answering, (self._info, self._tree, self._resolve))
        for repository in ("{organization}/{name}", "{name}"):
            api = f"/api/models/{repository}"
            routes += [
                Route(api, info, methods=["GET"]),
                Route(f"{api}/revision/{{revision:path}}", info, methods=["GET"]),
                Route(f"{api}/tree/{{location:path}}", tree, methods=["GET"]),
                Route(f"/{repository}/resolve/{{location:path}}", resolve, methods=["GET"]),
            ]
        return routes

    def _info(self, http: Request) -> Response:
        repository = self._repository(http)
        repository.split(http.path_params.get("revision", "main"), whole=True)
        return JSONResponse(repository.info())

    def _tree(self, http: Request) -> Response:
        repository = self._repository(http)
        folder = repository.split(http.path_params["location"])
        recursive = http.query_params.get("recursive", "").lower() in ("true", "1")
        return JSONResponse(repository.tree(folder, recursive=recursive))

    def _resolve(self, http: Request) -> Response:
        repository = self._repository(http)
        name = repository.split(http.path_params["location"])
        file = repository.file(name)
        try:
            stat_result = file.path.stat()
        except OSError:
            raise _Absence("EntryNotFound", f"{_shown(name)} is gone.") from None
        return _HubFile(
            file.path,
            headers={"ETag": f'"{file.etag}"', "X-Repo-Commit": repository.listing.commit},
            media_type="application/octet-stream",
            stat_result=stat_result,
        )

    def _repository(self, http: Request) -> _Repository:
        parts = (http.path_params.get("organization"), http.path_params["name"])
        repo_id = "/".join(filter(None, parts))
        try:
            # The Hub takes any case too, and answers with the right one.
            return self._repositories[repo_id.casefold()]
        except KeyError:
            pass
        served = ", ".join(each.model.repo_id for each in self._repositories.values())
        raise _Absence(
            "RepoNotFound",
            f"This server serves {served}, not {_shown(repo_id)}. Unset HF_ENDPOINT to use the Hub."
            if served
            else "This server has not loaded its model yet: try again when it is ready.",
        )


class _Repository:
    """One model's files, listed when they are first asked for."""

    def __init__(self, model: HubModel, *, share_weights: bool) -> None:
        self.model = model
        self._share_weights = share_weights
        self._lock = threading.Lock()
        self._listing: _Listing | None = None

    @property
    def listing(self) -> _Listing:
        """What is shared, and under which commit."""
        with self._lock:
            if self._listing is None:
                self._listing = _list(self.model.look(share_weights=self._share_weights))
            return self._listing

    def split(self, location: str, *, whole: bool = False) -> str:
        """The path below the revision that `location` begins with (or, if `whole`, is).

        Raises:
            _Absence: for a revision that is not served.
        """
        names = {"main", self.listing.commit, self.model.revision or "main"}
        for name in names:
            if location == name or (location.startswith(f"{name}/") and not whole):
                return location[len(name) + 1 :]
        raise _Absence(
            "RevisionNotFound",
            f"{self.model.repo_id} is served at revision {self.model.revision or 'main'} alone.",
        )

    def info(self) -> dict[str, object]:
        """What `HfApi.model_info` reads."""
        listing, task = self.listing, self.model.task
        return {
            "id": self.model.repo_id,
            "modelId": self.model.repo_id,
            "sha": listing.commit,
            "pipeline_tag": task,
            "tags": ["transformers", *([task] if task else [])],
            "library_name": "transformers",
            "private": False,
            "gated": False,
            "disabled": False,
            # Older clients cannot do without these two.
            "downloads": 0,
            "likes": 0,
            "siblings": [
                {"rfilename": name, "size": file.size, "blobId": file.etag}
                for name, file in listing.files.items()
            ],
        }

    def tree(self, folder: str, *, recursive: bool) -> list[dict[str, object]]:
        """What `HfApi.list_repo_tree` reads.

        Raises:
            _Absence: for a folder in which nothing is shared.
        """
        listing = self.listing
        prefix = f"{folder}/" if folder else ""
        below = {name: file for name, file in listing.files.items() if name.startswith(prefix)}
        if folder and not below:
            raise self._absence(folder)
        entries: dict[str, dict[str, object]] = {}
        for name, file in below.items():
            for parent in PurePosixPath(name).parents:
                path = str(parent)
                if path != "." and path.startswith(prefix):
                    oid = _sha1(path.encode(), listing.commit.encode())
                    entries[path] = {"type": "directory", "path": path, "oid": oid, "size": 0}
            entries[name] = {"type": "file", "path": name, "oid": file.etag, "size": file.size}
        return [
            entry
            for path, entry in sorted(entries.items())
            if recursive or "/" not in path.removeprefix(prefix)
        ]

    def file(self, name: str) -> _File:
        """The shared file of that name.

        Raises:
            _Absence: if there is none.
        """
        # Nothing but a name from the listing is ever opened: no path leads out of the folder.
        file = self.listing.files.get(name)
        if file is None:
            raise self._absence(name)
        return file

    def _absence(self, name: str) -> _Absence:
        listing = self.listing
        if name in listing.withheld:
            # Without the commit: a client would remember the file's absence for that commit, and
            # miss it when it is shared, or in the Hub's own repository.
            return _Absence(
                "EntryNotFound",
                f"{_shown(name)} is not shared: this server does not share weights, only what a model "
                "without weights is built from. Its operator can with --share-weights.",
            )
        commit = listing.commit if listing.is_whole else None
        message = f"There is no {_shown(name)} in {self.model.repo_id}."
        return _Absence("EntryNotFound", message, commit)


def _answering(endpoint: Callable[[Request], Response]) -> Callable[[Request], Response]:
    @functools.wraps(endpoint)
    def answer(http: Request) -> Response:
        try:
            return endpoint(http)
        except _Absence as absence:
            return absence.response()

    return answer


def _list(snapshot: Snapshot) -> _Listing:
    files = {
        name: _File(path, path.stat().st_size, _etag(path)) for name, path in snapshot.files.items()
    }
    contents = [f"{name}\n{file.etag}\n".encode() for name, file in files.items()]
    return _Listing(
        commit=snapshot.commit or _sha1(*contents),
        is_whole=snapshot.commit is None,
        files=files,
        withheld=snapshot.withheld,
    )


def _etag(path: Path) -> str:
    """The id that git gives the content, as the Hub does; of a large file, that of its state."""
    size = path.stat().st_size
    if size > _HASHED_BYTES:
        return _sha1(f"{path.name}\n{size}\n{path.stat().st_mtime_ns}".encode())
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sha1(*contents: bytes) -> str:
    return hashlib.sha1(b"\0".join(contents), usedforsecurity=False).hexdigest()


def _shown(name: str) -> str:
    """A client's words, as long as a sentence can bear and on one line."""
    return ascii(name[:200])
