"""`GET /results/{id}`: a result's bytes, where the object store is files of this server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from ndif.gateway.refusal import Refusal
from ndif.gateway.responses import job_id
from ndif.stores.objects import FileStore

_BYTES = "application/octet-stream"
_OK = 200


class _ResultFile(FileResponse):
    chunk_size = 1 << 20


class _ResultFileOnce(_ResultFile):
    """Says so when all of it has been sent."""

    def __init__(self, path: Path, sent: Callable[[], None]) -> None:
        super().__init__(path, media_type=_BYTES)
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `FileResponse`."""
        status, whole = 0, False

        async def watch(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body"):
                # Whoever is gone by now has not got the last piece.
                whole = status == _OK and not await Request(scope, receive).is_disconnected()
            await send(message)

        await super().__call__(scope, receive, watch)
        if whole:
            self._sent()


class Results:
    """Results by signed address."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def routes(self) -> list[BaseRoute]:
        """Where it answers."""
        return [Route("/results/{id}", self.result, methods=["GET"])]

    async def result(self, http: Request) -> Response:
        """A result's bytes; ranges are answered."""
        key = f"results/{job_id(http)}.pt"
        query = http.query_params
        once = "once" in query
        expires, signature = query.get("expires", ""), query.get("signature", "")
        if not self._store.verify(key, expires, signature, once=once):
            raise Refusal(
                403,
                "This address of a result is not signed by this server, or its time is over: use it as "
                f"it came with COMPLETED, within {self._store.ttl_s:g} seconds.",
            )
        path = self._store.path(key)
        if not path.is_file():
            raise Refusal(
                404,
                f"There is no result here: results are kept {self._store.ttl_s:g} s, and those of a live "
                "channel until they have been fetched.",
            )
        if once:
            return _ResultFileOnce(path, lambda: self._store.fetched(key))
        return _ResultFile(path, media_type=_BYTES)
