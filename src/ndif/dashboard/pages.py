"""The pages and static files of the dashboard, read once and sent compressed."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from importlib import resources
from importlib.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from ndif.gateway.http_error import HttpError, shown_path
from ndif.gateway.openapi import Answer, ApiRoute, Description, Parameter

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types by file suffix; files with other suffixes are not served."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""A Content-Security-Policy: only the page's own files run, and no text becomes markup or scripts."""
_FOR_EVER = "public, max-age=31536000, immutable"
_DIGITS = 16
_BASE = "{{files}}"
"""Placeholder in a page for the address of the static files."""

PAGE = Description(
    "the server",
    "The dashboard",
    answers={200: Answer({"type": "string"}, "A page.", media_types=("text/html",))},
)
_FILE = Description(
    "the server",
    "A file of the dashboard",
    "The address contains a version, so the content at an address never changes.",
    answers={
        200: Answer(
            {"type": "string"},
            "The file.",
            media_types=[kind.partition(";")[0] for end, kind in _TYPES.items() if end != ".html"],
            headers={"ETag": "The digest of the file's content."},
        )
    },
    parameters=(
        Parameter(
            "version",
            "path",
            "The version of the files, which the page contains.",
            "0123456789abcdef",
        ),
        Parameter("name", "path", "The file's name.", "style.css"),
    ),
    refusals={404: "The file does not exist, or no longer in this version."},
)


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    compressed: bytes
    media_type: str
    etag: str


class DashboardFiles:
    """The files of the folder `static`, at an address that changes with any of the files."""

    def __init__(self) -> None:
        contents = dict(_contents(resources.files("ndif.dashboard") / "static"))
        digest = hashlib.sha256()
        for name, content in sorted(contents.items()):
            digest.update(f"{name}\n{len(content)}\n".encode() + content)
        self.version = digest.hexdigest()[:_DIGITS]
        self._pages = {
            name: content.decode().replace(_BASE, f"/static/{self.version}")
            for name, content in contents.items()
            if name.endswith(".html")
        }
        self._files: Mapping[str, _File] = {
            name: _file(content, name)
            for name, content in contents.items()
            if name not in self._pages
        }

    def routes(self) -> list[BaseRoute]:
        """Return the route of the files."""
        return [ApiRoute("/static/{version}/{name:path}", self.file, _FILE)]

    def page(self, name: str, http: Request, **words: str) -> Response:
        """Return a page with each `{{word}}` replaced by its text, HTML-escaped."""
        content = self._pages[name]
        for word, text in words.items():
            content = content.replace(f"{{{{{word}}}}}", escape(text))
        return _answer(_file(content.encode(), name), http, "no-cache", _POLICY)

    async def file(self, http: Request) -> Response:
        """Answer with a static file."""
        file = self._files.get(http.path_params["name"])
        if file is None or http.path_params["version"] != self.version:
            raise HttpError(
                404, f"There is no file at {shown_path(http.url.path)}: reload the page."
            )
        return _answer(file, http, _FOR_EVER)


def _contents(folder: Traversable, place: str = "") -> Iterable[tuple[str, bytes]]:
    """Yield the path, relative to the first folder, and the content of each served file."""
    for entry in folder.iterdir():
        name = f"{place}{entry.name}"
        if entry.is_dir():
            yield from _contents(entry, f"{name}/")
        elif name[name.rfind(".") :] in _TYPES:
            yield name, entry.read_bytes()


def _file(content: bytes, name: str) -> _File:
    return _File(
        content,
        gzip.compress(content, mtime=0),
        _TYPES[name[name.rfind(".") :]],
        f'"{hashlib.sha256(content).hexdigest()[:_DIGITS]}"',
    )


def _answer(file: _File, http: Request, caching: str, policy: str | None = None) -> Response:
    headers = {"ETag": file.etag, "Cache-Control": caching, "Vary": "Accept-Encoding"}
    if policy is not None:
        headers["Content-Security-Policy"] = policy
    if file.etag in (part.strip() for part in http.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    content = file.content
    codings = {
        part.partition(";")[0].strip()
        for part in http.headers.get("accept-encoding", "").split(",")
    }
    if "gzip" in codings:
        content, headers["Content-Encoding"] = file.compressed, "gzip"
    return Response(content, headers=headers, media_type=file.media_type)
