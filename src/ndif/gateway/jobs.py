"""A user's own jobs, their steps, errors and results, their end, and what they add up to."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute

from ndif.config.units import format_duration
from ndif.control.answers import Usage
from ndif.control.operations import GetJobs, GetTrace, GetUsage, Kill, Operation, Perform
from ndif.errors import problems
from ndif.gateway.answers import JOB_ID, Cancelled, OwnJobs, OwnTraceAnswer
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import HttpError
from ndif.gateway.openapi import BYTES, Answer, ApiRoute, Content, Description, Parameter, answer
from ndif.gateway.results import job_id_of
from ndif.schema.plain_result import plain
from ndif.schema.status import Status
from ndif.stores.accounts import Account, Accounts
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.stores.objects.port import end_key, result_key
from ndif.stores.responder import StoredResponse, last_response

_MAX_QUOTED = 100
"""Characters of a client's text that an answer repeats."""
_AT_ONCE = 16
"""Stored responses that are read at once."""
_PIECE = 1 << 20
"""Bytes of a result that are in memory at once."""

_NUMBER = re.compile(r"[0-9]{1,9}")
_REFUSALS = {
    400: "A parameter is not valid.",
    401: "The API key is missing or unknown.",
    403: "The server has no keys, and cannot tell whose jobs are whose.",
    429: "Too many wrong keys came from this address.",
    503: "No process of this server leads at the moment, or its stores cannot be reached.",
}
_REQUESTS = Description(
    "jobs",
    "One's own jobs",
    {200: answer(OwnJobs)},
    parameters=(
        Parameter(
            "limit",
            "query",
            "Maximum number of those that have ended; else 100.",
            100,
            {"type": "integer", "minimum": 1, "maximum": 1000},
        ),
    ),
    refusals=_REFUSALS,
    needs="key",
)
_USAGE = Description(
    "jobs",
    "The cost of one's own jobs",
    {200: answer(Usage, "Sums over the jobs that have ended.")},
    parameters=(
        Parameter(
            "by",
            "query",
            "A sum for each of these; else for each model.",
            "model",
            {"enum": ["user", "model", "day"]},
        ),
        Parameter(
            "since",
            "query",
            "First day that counts, in UTC; else all count.",
            "2026-07-01",
            {"type": "string", "format": "date"},
        ),
    ),
    refusals=_REFUSALS,
    needs="key",
)
_TRACE = Description(
    "jobs",
    "The steps of a job of one's own",
    {200: answer(OwnTraceAnswer)},
    parameters=(Parameter("id", "path", "The job's id.", JOB_ID),),
    refusals={**_REFUSALS, 404: "The caller has no such job, or its record is no longer kept."},
    needs="key",
)
_RESULT = Description(
    "jobs",
    "Download the result of a job of one's own",
    {200: Answer("The result, as `torch.save` wrote it.", {BYTES: Content({})})},
    "Results of jobs that were sent with `blocking=False` are stored. Other than at the address that comes "
    "with COMPLETED, the bytes are never compressed: `torch.load` reads them.",
    parameters=(Parameter("id", "path", "The job's id.", JOB_ID),),
    refusals={**_REFUSALS, 404: "The caller has no such job, or its result is not stored."},
    needs="key",
)
_CANCEL = Description(
    "jobs",
    "End a job of one's own",
    {200: answer(Cancelled, "The job is ended.")},
    "Its live client, or whoever polls for it, is told so with ERROR.",
    parameters=(Parameter("id", "path", "The job's id.", JOB_ID),),
    refusals={
        **{status: _REFUSALS[status] for status in (401, 429, 503)},
        404: "No such job of the caller waits or runs.",
    },
    needs="key",
)

T = TypeVar("T", bound=Operation)


@dataclass(frozen=True)
class JobRoutes:
    """Answers with the jobs of the caller alone and their results, and ends one of them."""

    accounts: Accounts
    perform: Perform
    store: ObjectStore

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            ApiRoute("/requests", self.requests, _REQUESTS),
            ApiRoute("/requests/{id}", self.trace, _TRACE),
            ApiRoute("/requests/{id}/result", self.result, _RESULT),
            ApiRoute("/usage", self.usage, _USAGE),
            ApiRoute("/request/{id}", self.cancel, _CANCEL, "DELETE"),
        ]

    async def requests(self, http: Request) -> Response:
        """Answer with the caller's unfinished jobs, and those that ended last."""
        account, query = await self._known(http), http.query_params
        limit = query.get("limit", "100")
        number = int(limit) if _NUMBER.fullmatch(limit) else limit
        asked = _asked(GetJobs, {"user": account.user, "limit": number})
        answer = await self.perform(asked)
        jobs = [
            {name: value for name, value in job.items() if name != "user"} for job in answer["jobs"]
        ]
        stored = await self._stored(
            [job["id"] for job in jobs if _may_be_stored(job, self.store.ttl_s, time.time())]
        )
        for job in jobs:
            if job["ended"] is not None:
                job["stored"] = None if stored is None else job["id"] in stored
        return JSONResponse({"requests": jobs})

    async def trace(self, http: Request) -> Response:
        """Answer with the steps of one of the caller's jobs, and with the error of one that failed."""
        found = await self._own(http)
        kept = await self._last_response(found)
        found["error"] = None
        if kept is not None and kept.status is Status.ERROR:
            found["error"] = kept.fields["description"]
        del found["user"]
        return JSONResponse(found)

    async def result(self, http: Request) -> Response:
        """Answer with the result of one of the caller's jobs, which may take any time and little memory."""
        found = await self._own(http)
        kept = await self._last_response(found)
        file = None
        if kept is not None and kept.status is Status.COMPLETED:
            file = await self.store.open(result_key(found["id"]))
        if file is None:
            raise HttpError(
                404,
                f"The result of this job is not stored: those of jobs sent with blocking=False are, for "
                f"{format_duration(self.store.ttl_s)}.",
            )
        name = f'attachment; filename="{found["id"]}.pt"'
        return StreamingResponse(
            _pieces(file), media_type=BYTES, headers={"Content-Disposition": name}
        )

    async def usage(self, http: Request) -> Response:
        """Answer with the sums of the caller's jobs that have ended, by model or by day."""
        account, query = await self._known(http), http.query_params
        fields = {"by": query.get("by", "model"), "since": query.get("since")}
        asked = _asked(GetUsage, {**fields, "user": account.user})
        return JSONResponse(await self.perform(asked))

    async def cancel(self, http: Request) -> Response:
        """End a job of the caller that waits or runs."""
        account = await self.accounts.account(caller_of(http))
        await self.perform(Kill(request_id=job_id_of(http), user=account.user))
        return JSONResponse({"cancelled": True, "id": job_id_of(http)})

    async def _own(self, http: Request) -> dict[str, Any]:
        """Return the trace of the job in the path, which has to be the caller's."""
        account = await self._known(http)
        return await self.perform(GetTrace(job_id=job_id_of(http), user=account.user))

    async def _last_response(self, trace: Mapping[str, Any]) -> StoredResponse | None:
        """Return what is stored for the client of a job, if that polls and the job is its user's."""
        kept = await last_response(self.store, trace["id"])
        # A job of a user without a key has none with its response.
        return kept if kept is not None and kept.user in ("", trace["user"]) else None

    async def _stored(self, ids: Sequence[str]) -> set[str] | None:
        """Return those of the completed jobs that were polled for; None while the store is away."""
        found: set[str] = set()
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            try:
                ends = await asyncio.gather(*(self.store.get(end_key(each)) for each in some))
            except ObjectStoreError:
                return None
            found.update(each for each, end in zip(some, ends, strict=True) if end)
        return found

    async def _known(self, http: Request) -> Account:
        """Return the caller's account, if it is one that nobody else can have."""
        caller = caller_of(http)
        account = await self.accounts.account(caller)
        # An address may be that of many, and where there are no keys, the id of a job is all one needs.
        if not account.key and caller.uid is None:
            raise HttpError(
                403,
                "This server has no API keys, so it cannot tell whose jobs are whose. Ask for each with "
                "GET /response/ID.",
            )
        return account


def _may_be_stored(job: Mapping[str, Any], ttl_s: float, now: float) -> bool:
    """Return True for a completed job whose result has not expired."""
    if job["status"] != Status.COMPLETED.value:
        return False
    ended: float = job["ended"]
    return ended + ttl_s > now


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield a stored result, decompressed, and close its file."""
    with file:
        result = plain(file)
        while piece := await asyncio.to_thread(result.read, _PIECE):
            yield piece


def _asked(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Return the operation with these fields; a wrong one is an `HttpError`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = problems(error)[0]
        field = str(first.location[0]) if first.location else "the query"
        raise HttpError(400, f"{field[:_MAX_QUOTED]}: {first.reason}.") from error
