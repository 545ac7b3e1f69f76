"""A read-only mirror of the Hugging Face Hub's routes, for clients that build a model without the Hub.

Clients use it with `HF_ENDPOINT=http://HOST:PORT/hub`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute

from ndif.cluster.model_files import StoredFiles
from ndif.control.publisher import FILES
from ndif.gateway.answers import HUB_TREE_EXAMPLE, HubEntry, HubModel, HubRefusal, HubSibling
from ndif.gateway.openapi import (
    BYTES,
    Answer,
    ApiRoute,
    Description,
    Parameter,
    json_response,
)
from ndif.host.snapshot import Snapshot, scan, unpack
from ndif.stores.broker import BrokerError
from ndif.stores.objects import ObjectStore, ObjectStoreError

if TYPE_CHECKING:
    # A server of one process does not need Redis.
    from ndif.stores.leader import SharedCache

logger = logging.getLogger(__name__)

_MAX_HASHED_BYTES = 64 << 20
"""Maximum size of a file whose content is hashed: hashing a larger one would keep clients waiting."""
_CHUNK_BYTES = 1 << 20
_INTERVAL_S = 1.0


@dataclass(frozen=True)
class MirroredModel:
    """A model whose files the mirror serves."""

    repo_id: str
    source: Path | Snapshot
    """A snapshot in a Hugging Face cache, a plain folder, or files that another machine sent."""
    revision: str | None
    task: str | None


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    etag: str


@dataclass(frozen=True)
class _Listing:
    commit: str
    is_complete: bool
    """True if the commit has only the files of the folder; False if it is a commit of the Hub."""
    files: dict[str, _File]
    withheld: frozenset[str]


class _NotFoundError(Exception):
    """A missing repository, revision or file; headers tell huggingface_hub which of them is missing."""

    def __init__(self, code: str, message: str, commit: str | None = None) -> None:
        super().__init__(message)
        in_header = message.encode("ascii", "backslashreplace").decode()
        self.headers = {"X-Error-Code": code, "X-Error-Message": in_header}
        if commit is not None:
            self.headers["X-Repo-Commit"] = commit


_COMMIT_HEADER = {"X-Repo-Commit": "The commit of the files."}
_INFO = ("A repository", {200: Answer(HubModel)})
_TREE = ("A listing of files", {200: Answer(list[HubEntry], example=HUB_TREE_EXAMPLE)})
_RESOLVE = (
    "A file",
    {
        200: Answer(
            {},
            "The file.",
            media_types=(BYTES,),
            headers={**_COMMIT_HEADER, "ETag": "Version of the content."},
        ),
        206: Answer(
            {},
            "The requested part, or several parts.",
            media_types=(BYTES, "multipart/byteranges"),
            headers=_COMMIT_HEADER,
        ),
    },
)
_REVISION = Parameter("revision", "path", "The revision; it may contain slashes.", "main")
_LOCATION = Parameter("location", "path", "The revision, and maybe a folder in it.", "main")
_FILE = Parameter("location", "path", "The revision, a slash and the file.", "main/config.json")
_RECURSIVE = Parameter("recursive", "query", "`true` lists the files of folders, too.", "true")
_RANGE = Parameter("Range", "header", "The requested part.", "bytes=0-1023")
_NAMES = {
    "organization": Parameter(
        "organization", "path", "The repository's owner.", "openai-community"
    ),
    "name": Parameter("name", "path", "The repository's name.", "gpt2"),
}


def _describe(
    repository: str, summary: str, answers: Mapping[int, Answer], *parameters: Parameter
) -> Description:
    """Return the description of a route; the parts of `repository` in braces are path parameters."""
    return Description(
        "files of the models",
        summary,
        "Answers like the Hugging Face Hub. Clients use it with `HF_ENDPOINT=https://HOST/hub`.",
        answers={
            **answers,
            404: Answer(
                HubRefusal,
                "The repository, revision or file does not exist.",
                headers=_ERROR_HEADERS,
            ),
        },
        parameters=(
            *(parameter for name, parameter in _NAMES.items() if f"{{{name}}}" in repository),
            *parameters,
        ),
    )


_ERROR_HEADERS = {
    "X-Error-Code": "RepoNotFound, RevisionNotFound or EntryNotFound.",
    "X-Error-Message": "The error's message, in ASCII.",
}


class HfMirror:
    """The mirror's routes, for models that this server has accepted and whose files are on this machine."""

    def __init__(
        self, *, share_weights: bool, find: Callable[[str], MirroredModel | None] = lambda _: None
    ) -> None:
        """`find` returns the accepted model of a repo id, once its files are here; it is thread-safe."""
        self._find = find
        self._share_weights = share_weights
        self._repositories: dict[str, _Repository] = {}

    def serve(self, model: MirroredModel) -> None:
        """Serve `model`, instead of any model of the same name."""
        repository = _Repository(model, share_weights=self._share_weights)
        self._repositories[model.repo_id.casefold()] = repository

    def routes(self) -> list[BaseRoute]:
        """Return the routes, relative to the clients' `HF_ENDPOINT`."""
        routes: list[BaseRoute] = []
        answers = _Repository.info, _Repository.tree, _Repository.resolve
        info, tree, resolve = map(self._answering, answers)
        for repository in ("{organization}/{name}", "{name}"):
            api = f"/api/models/{repository}"
            routes += [
                ApiRoute(api, info, _describe(repository, *_INFO)),
                ApiRoute(
                    f"{api}/revision/{{revision:path}}",
                    info,
                    _describe(repository, *_INFO, _REVISION),
                ),
                ApiRoute(
                    f"{api}/tree/{{location:path}}",
                    tree,
                    _describe(repository, *_TREE, _LOCATION, _RECURSIVE),
                ),
                ApiRoute(
                    f"/{repository}/resolve/{{location:path}}",
                    resolve,
                    _describe(repository, *_RESOLVE, _FILE, _RANGE),
                ),
            ]
        return routes

    def _answering(
        self, answer: Callable[[_Repository, Request], Any]
    ) -> Callable[[Request], Response]:
        # A plain function, which Starlette runs in a thread, because it reads files.
        def respond(http: Request) -> Response:
            try:
                content = answer(self._repository(http), http)
            except _NotFoundError as error:
                return json_response(HubRefusal(error=str(error)), 404, error.headers)
            return content if isinstance(content, Response) else json_response(content)

        return respond

    def _repository(self, http: Request) -> _Repository:
        parts = (http.path_params.get("organization"), http.path_params["name"])
        repo_id = "/".join(filter(None, parts))
        # Like the Hub, ignore the case of the name, and answer with the canonical one.
        name = repo_id.casefold()
        if name not in self._repositories and (model := self._find(repo_id)) is not None:
            self.serve(model)
        if repository := self._repositories.get(name):
            return repository
        names = ", ".join(mirrored.model.repo_id for mirrored in self._repositories.values())
        raise _NotFoundError(
            "RepoNotFound",
            f"This server serves {names}, not {_shown(repo_id)}. Unset HF_ENDPOINT to use the Hub."
            if names
            else f"The files of {_shown(repo_id)} are not on this server yet: try again when it is loaded.",
        )


class _Repository:
    """One model's files, listed at the first request."""

    def __init__(self, model: MirroredModel, *, share_weights: bool) -> None:
        self.model = model
        self._share_weights = share_weights

    @cached_property
    def listing(self) -> _Listing:
        """The shared files and their commit."""
        snapshot = self.model.source
        if not isinstance(snapshot, Snapshot):
            snapshot = scan(snapshot, self.model.revision, share_weights=self._share_weights)
        files = {
            name: _File(path, path.stat().st_size, _etag(path))
            for name, path in snapshot.files.items()
        }
        contents = [f"{name}\n{file.etag}\n".encode() for name, file in files.items()]
        return _Listing(
            commit=snapshot.commit or _sha1(*contents),
            is_complete=snapshot.commit is None,
            files=files,
            withheld=snapshot.withheld,
        )

    def split(self, location: str, *, whole: bool = False) -> str:
        """Return the part of `location` after its revision; with `whole`, only a revision is valid."""
        names = {"main", self.listing.commit, self.model.revision or "main"}
        for name in names:
            if location == name or (location.startswith(f"{name}/") and not whole):
                return location[len(name) + 1 :]
        raise _NotFoundError(
            "RevisionNotFound",
            f"{self.model.repo_id} is served at revision {self.model.revision or 'main'} alone.",
        )

    def info(self, http: Request) -> HubModel:
        """Answer as `HfApi.model_info` reads it."""
        self.split(http.path_params.get("revision", "main"), whole=True)
        listing, task = self.listing, self.model.task
        return HubModel(
            id=self.model.repo_id,
            modelId=self.model.repo_id,
            sha=listing.commit,
            pipeline_tag=task,
            tags=["transformers", *([task] if task else [])],
            library_name="transformers",
            private=False,
            gated=False,
            disabled=False,
            # Older versions of huggingface_hub require these two.
            downloads=0,
            likes=0,
            siblings=[
                HubSibling(rfilename=name, size=file.size, blobId=file.etag)
                for name, file in listing.files.items()
            ],
        )

    def tree(self, http: Request) -> list[HubEntry]:
        """Answer as `HfApi.list_repo_tree` reads it."""
        folder, listing = self.split(http.path_params["location"]), self.listing
        recursive = http.query_params.get("recursive", "").lower() in ("true", "1")
        prefix = f"{folder}/" if folder else ""
        below = {name: file for name, file in listing.files.items() if name.startswith(prefix)}
        if folder and not below:
            raise self._not_found(folder)
        entries: dict[str, HubEntry] = {}
        for name, file in below.items():
            for parent in PurePosixPath(name).parents:
                path = str(parent)
                if path != "." and path.startswith(prefix):
                    oid = _sha1(path.encode(), listing.commit.encode())
                    entries[path] = HubEntry(type="directory", path=path, oid=oid, size=0)
            entries[name] = HubEntry(type="file", path=name, oid=file.etag, size=file.size)
        return [
            entry
            for path, entry in sorted(entries.items())
            if recursive or "/" not in path.removeprefix(prefix)
        ]

    def resolve(self, http: Request) -> Response:
        """Answer with a file's content."""
        name = self.split(http.path_params["location"])
        # Only listed files are opened, so no path leads out of the folder.
        file = self.listing.files.get(name)
        if file is None:
            raise self._not_found(name)
        try:
            stat_result = file.path.stat()
        except OSError:
            raise _NotFoundError("EntryNotFound", f"{_shown(name)} is gone.") from None
        answer = FileResponse(
            file.path,
            headers={"ETag": f'"{file.etag}"', "X-Repo-Commit": self.listing.commit},
            media_type="application/octet-stream",
            stat_result=stat_result,
        )
        answer.chunk_size = _CHUNK_BYTES
        return answer

    def _not_found(self, name: str) -> _NotFoundError:
        listing = self.listing
        if name in listing.withheld:
            # Without the commit: with it, a client would cache the file's absence, and not find the file
            # once this server shares it, or at the Hub itself.
            return _NotFoundError(
                "EntryNotFound",
                f"{_shown(name)} is not shared: this server does not share weights, only "
                "the files that a model without weights needs. Its operator can share weights with "
                "--share-weights.",
            )
        commit = listing.commit if listing.is_complete else None
        message = f"There is no {_shown(name)} in {self.model.repo_id}."
        return _NotFoundError("EntryNotFound", message, commit)


def _etag(path: Path) -> str:
    """Return the content's git blob id, as the Hub does; of a large file, a hash of name, size and time."""
    size = path.stat().st_size
    if size > _MAX_HASHED_BYTES:
        return _sha1(f"{path.name}\n{size}\n{path.stat().st_mtime_ns}".encode())
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sha1(*contents: bytes) -> str:
    return hashlib.sha1(b"\0".join(contents), usedforsecurity=False).hexdigest()


def _shown(name: str) -> str:
    """Return a client's text quoted, in printable ASCII, cut to 200 characters."""
    return ascii(name[:200])


class PublishedModels:
    """Models whose files the leader's `Publisher` has published, for the mirror of another process."""

    def __init__(self, cache: SharedCache, objects: ObjectStore) -> None:
        """Read the names from `cache`, and the files from `objects`."""
        self._cache = cache
        self._objects = objects
        self._models: dict[str, MirroredModel] = {}
        self._fetched: dict[str, str] = {}
        self._fetching = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._folder = Path()

    def find(self, repo_id: str) -> MirroredModel | None:
        """Return a published model, fetched now if it is new; call it outside the event loop's thread.

        A client that found a model at one gateway must find it at the others, before their next poll.
        """
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._refresh(), self._loop).result()
        return self._models.get(repo_id.casefold())

    async def run(self, mirror: HfMirror) -> None:
        """Poll for published models and serve them on `mirror`, until cancelled."""
        with TemporaryDirectory(prefix="ndif-mirror-", ignore_cleanup_errors=True) as folder:
            self._folder, self._loop = Path(folder), asyncio.get_running_loop()
            served: dict[str, MirroredModel] = {}
            try:
                while True:
                    await self._refresh()
                    for name, model in self._models.items():
                        if served.get(name) is not model:
                            mirror.serve(model)
                            served[name] = model
                    await asyncio.sleep(_INTERVAL_S)
            finally:
                self._loop = None

    async def _refresh(self) -> None:
        """Fetch files that were published since the last call; log errors instead of raising them."""
        try:
            async with self._fetching:
                stored = await self._cache.read(FILES, dict[str, StoredFiles]) or {}
                for repo_id, published in stored.items():
                    if self._fetched.get(repo_id) == published.files:
                        continue
                    if (model := await self._fetch(repo_id, published)) is not None:
                        self._models[repo_id.casefold()] = model
                        self._fetched[repo_id] = published.files
        except (BrokerError, ObjectStoreError) as error:
            logger.info("the models' files could not be fetched: %s", error)
        except Exception:
            logger.exception("the models' files could not be fetched")

    async def _fetch(self, repo_id: str, published: StoredFiles) -> MirroredModel | None:
        content = await self._objects.get(published.files)
        if content is None:
            return None
        folder = self._folder / Path(published.files).stem
        snapshot = await asyncio.to_thread(unpack, content, folder)
        return MirroredModel(repo_id, snapshot, published.revision, published.task)
