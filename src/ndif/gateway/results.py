"""`GET /response/{id}` and `GET /results/{id}`: the routes of clients that poll or download."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope, Send

from ndif.config.units import format_duration
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import HttpError
from ndif.gateway.openapi import (
    BYTES,
    Answer,
    ApiRoute,
    Description,
    Parameter,
)
from ndif.host.job import RUNS
from ndif.schema import wires
from ndif.schema.payload import ZSTD_MAGIC
from ndif.schema.response import Response as Update
from ndif.schema.status import Status
from ndif.schema.wires import JOB_ID, JobUpdate
from ndif.stores.accounts import Accounts
from ndif.stores.objects import FileStore, ObjectStore
from ndif.stores.objects.port import file_name, result_key
from ndif.stores.responder import StoredResponse, last_response

_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OK = 200


def is_job_id(text: str) -> bool:
    """Return True if `text` has the form of a job's id."""
    return _JOB_ID.fullmatch(text) is not None


def job_id_of(http: Request) -> str:
    """Return the job id in the path; raise an `HttpError` (404) if it has another form."""
    request_id: str = http.path_params["id"]
    if not is_job_id(request_id):
        raise HttpError(404, f"{request_id[:64]!r} is not the id of a job.")
    return request_id


UpdateOf = Callable[[str, "Status | None"], Awaitable["StoredResponse | None"]]
"""Returns the update that follows a request's stored one; see `ndif.control.leader.Leader.update_of`."""


_ID = Parameter("id", "path", "The job's id.", JOB_ID)
_COMPLETED = {
    "id": JOB_ID,
    "status": "COMPLETED",
    "description": "Your job has been completed.",
    "data": f"https://ndif.example.org/results/{JOB_ID}?expires=1785003600&signature=9c1d",
    "meta": {"execution_time": 0.31, "peak_memory": 0},
}
_RESPONSE = Description(
    "jobs",
    "The last update of a job",
    "Only jobs that were sent without a live channel (`blocking=False`) are kept for this. An unknown "
    "job is answered with an ERROR, because clients of 0.8 take 404 for a job that is not there yet.",
    answers={200: Answer(JobUpdate, "The job's state.", example=_COMPLETED)},
    parameters=(_ID,),
    refusals={
        401: "The API key is missing or unknown.",
        403: "The job is another user's.",
        429: "Too many wrong keys came from this address.",
        503: "The server cannot reach its stores.",
    },
    needs="key",
)
_RESULT = Description(
    "jobs",
    "Download a result",
    "COMPLETED contains the whole address. It is signed, so no key is needed. If results are in an object "
    "store, it is an address of that store instead.",
    answers={
        200: Answer(
            {},
            "The result, as `torch.save` wrote it, mostly compressed with zstd.",
            media_types=(BYTES,),
            headers={
                "Content-Disposition": "File name for a browser: `ID.pt.zst` if the result is compressed, "
                "else `ID.pt`."
            },
        ),
        206: Answer(
            {},
            "The requested part, or several parts.",
            media_types=(BYTES, "multipart/byteranges"),
        ),
    },
    parameters=(
        _ID,
        Parameter("expires", "query", "Unix time at which the address expires.", "1785003600"),
        Parameter("signature", "query", "The server's signature.", "9c1d"),
        Parameter("once", "query", "Present if the result is deleted after it was fetched.", ""),
        Parameter("Range", "header", "The requested part.", "bytes=0-1023"),
    ),
    refusals={
        403: "The address is not signed, or has expired.",
        404: "The result is gone.",
    },
)


@dataclass(frozen=True)
class ResponseRoute:
    """Answers with the last response of a polled job; with API keys, only to the job's user."""

    store: ObjectStore
    update_of: UpdateOf
    accounts: Accounts

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [ApiRoute("/response/{id}", self.response, _RESPONSE)]

    async def response(self, http: Request) -> JobUpdate:
        """Answer with the job's last response: the stored one, or a newer one from the queue."""
        request_id: str = http.path_params["id"]
        account = await self.accounts.account(caller_of(http))
        if not is_job_id(request_id):
            return _error(request_id[:64], f"{request_id[:64]!r} is not the id of a job.")
        last = await last_response(self.store, request_id)
        stored = None if last is None else last.status
        if stored is None or not stored.terminal:
            update = await self.update_of(request_id, stored)
            if stored not in RUNS or update is not None:
                # The job may have left the queue, or ended, since the first read.
                last = await last_response(self.store, request_id) or last
            if update is not None and (last is None or not last.status.terminal):
                # A stored response may expire before a job that waits or runs for long has ended.
                last = (
                    update
                    if last is None
                    else StoredResponse({**last.fields, **update.fields}, last.user)
                )
        if last is None:
            # A job is stored before its client learns its id, so it cannot appear later.
            return _error(
                request_id,
                f"No job {request_id} is known here. Only jobs sent with blocking=False are kept, for "
                f"{format_duration(self.store.response_ttl_s)}.",
            )
        if account.key and last.user != account.user:
            raise HttpError(
                403, f"The job {request_id} is another user's: use the key that sent it."
            )
        if last.expires is not None and last.expires < time.time():
            until = datetime.fromtimestamp(last.expires, timezone.utc)
            return _error(
                request_id,
                f"The result of the job {request_id} was kept until {until:%Y-%m-%d %H:%M} UTC, "
                f"{format_duration(self.store.ttl_s)} after its end. Send the job again.",
            )
        return last.fields


def _error(request_id: str, reason: str) -> JobUpdate:
    """Return an ERROR for a polling client, in a form that both wires read."""
    return wires.envelope_fields(Update(request_id, Status.ERROR, reason))


@dataclass(frozen=True)
class ResultRoute:
    """Serves results that are files of this server, at URLs that the server signed."""

    store: FileStore

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [ApiRoute("/results/{id}", self.result, _RESULT)]

    async def result(self, http: Request) -> Response:
        """Answer with a result's bytes, or a range; delete a result with `once` after a full download."""
        key = result_key(job_id_of(http))
        query = http.query_params
        once = "once" in query
        expires, signature = query.get("expires", ""), query.get("signature", "")
        if not self.store.verify(key, expires, signature, once=once):
            raise HttpError(
                403,
                "This address of a result is not signed by this server, or its time is over: use it as "
                f"it came with COMPLETED, within {format_duration(self.store.ttl_s)}.",
            )
        path = self.store.path(key)
        try:
            with path.open("rb") as file:
                name = file_name(key, file.read(len(ZSTD_MAGIC)))
        except FileNotFoundError as error:
            raise HttpError(
                404,
                f"There is no result here: results are kept {format_duration(self.store.ttl_s)}, and a "
                "result for a waiting client until the client has fetched it.",
            ) from error
        return _ResultFile(path, name, lambda: self.store.fetched(key) if once else None)


class _ResultFile(FileResponse):
    """A file response that calls `on_delivered` once the client has received all of it."""

    chunk_size = 1 << 20

    def __init__(self, path: Path, name: str, on_delivered: Callable[[], None]) -> None:
        super().__init__(path, media_type="application/octet-stream", filename=name)
        self._on_delivered = on_delivered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, is_complete = 0, False

        async def observe(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body"):
                # If the client has left by now, it has not received the last piece.
                is_complete = status == _OK and not await Request(scope, receive).is_disconnected()
            await send(message)

        await super().__call__(scope, receive, observe)
        if is_complete:
            self._on_delivered()
