"""A user's own jobs: `GET /requests`, `GET /requests/{id}`, `DELETE /request/{id}` and `GET /usage`."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.routing import BaseRoute

from ndif.control.answers import UsageReport
from ndif.control.operations import GetJobs, GetTrace, GetUsage, Kill, Operation, Perform
from ndif.errors import problems
from ndif.gateway.answers import Cancelled, OwnJobs, OwnTraceAnswer
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import HttpError
from ndif.gateway.openapi import ApiRoute, Description, Parameter
from ndif.gateway.results import job_id_of
from ndif.schema.answer import project
from ndif.schema.job_state import JobList, Trace
from ndif.schema.status import Status
from ndif.schema.wires import JOB_ID
from ndif.stores.accounts import Account, Accounts
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.stores.responder import last_response
from ndif.tasks import within

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0
"""Seconds to wait for the stored response; if the store is silent, a trace is answered without it."""
_MAX_QUOTED = 100
"""Characters of a client's text that an answer repeats."""

_NUMBER = re.compile(r"[0-9]{1,9}")
_REFUSALS = {
    400: "A parameter is not valid.",
    401: "The API key is missing or unknown.",
    403: "The server has no keys, so it cannot assign jobs to users.",
    429: "Too many wrong keys came from this address.",
    503: "This server has no leader at the moment, or cannot reach its stores.",
}
_REQUESTS = Description(
    "jobs",
    "One's own jobs",
    parameters=(
        Parameter(
            "limit",
            "query",
            "Maximum number of ended jobs; 100 by default.",
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
    answered="Sums over the jobs that have ended.",
    parameters=(
        Parameter(
            "by",
            "query",
            "Group of each sum; `model` by default.",
            "model",
            {"enum": ["user", "model", "day"]},
        ),
        Parameter(
            "since",
            "query",
            "First day to include, in UTC; by default all days.",
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
    "For a job that was sent without a live channel (`blocking=False`), the answer has the error of a "
    "failed job, and says if the result of a completed job is stored.",
    parameters=(Parameter("id", "path", "The job's id.", JOB_ID),),
    refusals={**_REFUSALS, 404: "The caller has no such job, or its record is no longer kept."},
    needs="key",
)
_CANCEL = Description(
    "jobs",
    "End a job of one's own",
    "The job's client, live or polling, receives an ERROR.",
    "The job is ended.",
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
    """Routes for a user's own jobs; no caller sees or ends a job of another user."""

    accounts: Accounts
    perform: Perform
    store: ObjectStore

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            ApiRoute("/requests", self.requests, _REQUESTS),
            ApiRoute("/requests/{id}", self.trace, _TRACE),
            ApiRoute("/usage", self.usage, _USAGE),
            ApiRoute("/request/{id}", self.cancel, _CANCEL, "DELETE"),
        ]

    async def requests(self, http: Request) -> OwnJobs:
        """Answer with the caller's unfinished jobs, and the jobs that ended last."""
        account, query = await self._identified(http), http.query_params
        limit = query.get("limit", "100")
        number = int(limit) if _NUMBER.fullmatch(limit) else limit
        operation = _operation(GetJobs, {"user": account.user, "limit": number})
        answer: JobList = await self.perform(operation)
        return OwnJobs(requests=[job.own for job in answer.jobs])

    async def trace(self, http: Request) -> OwnTraceAnswer:
        """Answer with the steps of a job of the caller, and with the error or result of a polled one."""
        account = await self._identified(http)
        trace: Trace = await self.perform(GetTrace(job_id=job_id_of(http), user=account.user))
        error, stored = await self._stored_outcome(trace, account)
        return project(OwnTraceAnswer, trace, error=error, stored=stored)

    async def usage(self, http: Request) -> UsageReport:
        """Answer with the sums of the caller's jobs that have ended, by model or by day."""
        account, query = await self._identified(http), http.query_params
        parameters = {"by": query.get("by", "model"), "since": query.get("since")}
        operation = _operation(GetUsage, {**parameters, "user": account.user})
        report: UsageReport = await self.perform(operation)
        return report

    async def cancel(self, http: Request) -> Cancelled:
        """End a waiting or running job of the caller."""
        account = await self.accounts.account(caller_of(http))
        await self.perform(Kill(request_id=job_id_of(http), user=account.user))
        return Cancelled(cancelled=True, id=job_id_of(http))

    async def _stored_outcome(
        self, trace: Trace, account: Account
    ) -> tuple[str | None, bool | None]:
        """Return the error of a failed job, and True if its result is stored.

        Only polled jobs have a stored response. Both are None if the store is unavailable.
        """
        error, stored = None, False
        if trace.ended is None:
            return None, False
        try:
            response = await within(last_response(self.store, trace.id), _PATIENCE_S)
        except (ObjectStoreError, asyncio.TimeoutError) as unavailable:
            reason = str(unavailable) or f"no answer within {_PATIENCE_S:g} s"
            logger.warning("job %s: its stored response cannot be read: %s", trace.id, reason)
            return None, None
        # Responses of jobs that were sent without a key name no user.
        if response is not None and response.user == (account.user if account.key else ""):
            if response.status is Status.ERROR:
                error = response.fields["description"]
            elif response.status is Status.COMPLETED and trace.status == Status.COMPLETED:
                stored = trace.ended + self.store.ttl_s > time.time()
        return error, stored

    async def _identified(self, http: Request) -> Account:
        """Return the caller's account; raise an HttpError (403) if several users may share it."""
        caller = caller_of(http)
        account = await self.accounts.account(caller)
        # Without keys, an account is an address, which several users may share. A local user id is unique.
        if not account.key and caller.uid is None:
            raise HttpError(
                403,
                "This server has no API keys, so it cannot assign jobs to users. Ask for each job "
                "with GET /response/ID.",
            )
        return account


def _operation(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Return the operation with these fields; raise an `HttpError` that names a wrong field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = problems(error)[0]
        field = str(first.location[0]) if first.location else "the query"
        raise HttpError(400, f"{field[:_MAX_QUOTED]}: {first.reason}.") from error
