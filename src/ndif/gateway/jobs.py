"""A user's own jobs: `GET /requests`, `DELETE /request/{id}` and `GET /usage`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from ndif.control.answers import Fields
from ndif.control.operations import GetJobs, GetUsage, Kill, Operation, Perform
from ndif.errors import problems
from ndif.gateway.answers import JOB_ID
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import HttpError
from ndif.gateway.openapi import ApiRoute, Description, Parameter, answer
from ndif.gateway.results import job_id_of
from ndif.stores.accounts import Account, Accounts

_MAX_QUOTED = 100
"""Characters of a client's text that an answer repeats."""

T = TypeVar("T", bound=Operation)


_REFUSALS = {
    401: "The API key is missing or unknown.",
    403: "This server has no keys, or the job is another user's.",
    503: "The record of jobs cannot be read now.",
}
_REQUESTS = Description(
    "jobs",
    "One's own jobs: unfinished ones, and those that ended last",
    {200: answer(Fields)},
    parameters=(Parameter("limit", "query", "Maximum number of ended ones.", "100"),),
    refusals=_REFUSALS,
    needs="key",
)
_USAGE = Description(
    "jobs",
    "One's own usage",
    {200: answer(Fields)},
    parameters=(
        Parameter("by", "query", "`model` or `day`.", "model"),
        Parameter("since", "query", "First day that counts, in UTC.", "2025-01-21"),
    ),
    refusals=_REFUSALS,
    needs="key",
)
_CANCEL = Description(
    "jobs",
    "Cancel a job of one's own",
    {
        200: answer(
            {
                "type": "object",
                "properties": {"cancelled": {"const": True}, "id": {"type": "string"}},
                "required": ["cancelled", "id"],
                "additionalProperties": False,
            },
            "The job is ended.",
            example={"cancelled": True, "id": JOB_ID},
        )
    },
    parameters=(Parameter("id", "path", "The job's id.", JOB_ID),),
    refusals={**_REFUSALS, 404: "No such job waits or runs."},
    needs="key",
)


@dataclass(frozen=True)
class JobRoutes:
    """Answers with the jobs of the caller alone, and ends one of them."""

    accounts: Accounts
    perform: Perform

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            ApiRoute("/requests", self.requests, _REQUESTS),
            ApiRoute("/usage", self.usage, _USAGE),
            ApiRoute("/request/{id}", self.cancel, _CANCEL, "DELETE"),
        ]

    async def requests(self, http: Request) -> Response:
        """Answer with the caller's unfinished jobs, and those that ended last."""
        account, query = await self._known(http), http.query_params
        limit = query.get("limit", "100")
        asked = _asked(
            lambda: GetJobs(user=account.user, limit=int(limit) if limit.isdigit() else 0)
        )
        answer = await self.perform(asked)
        jobs = [
            {name: value for name, value in job.items() if name != "user"} for job in answer["jobs"]
        ]
        return JSONResponse({"requests": jobs})

    async def usage(self, http: Request) -> Response:
        """Answer with the sums of the caller's jobs that have ended, by model or by day."""
        account, query = await self._known(http), http.query_params
        asked = _asked(
            lambda: GetUsage.model_validate(
                {
                    "by": query.get("by", "model"),
                    "since": query.get("since"),
                    "user": account.user,
                }
            )
        )
        return JSONResponse(await self.perform(asked))

    async def cancel(self, http: Request) -> Response:
        """End a job of the caller that waits or runs."""
        account = await self.accounts.account(caller_of(http))
        await self.perform(Kill(request_id=job_id_of(http), user=account.user))
        return JSONResponse({"cancelled": True, "id": job_id_of(http)})

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


def _asked(make: Callable[[], T]) -> T:
    """Return an operation; a wrong parameter is an `HttpError`."""
    try:
        return make()
    except ValidationError as error:
        first = problems(error)[0]
        field = str(first.location[0]) if first.location else "the query"
        raise HttpError(400, f"{field[:_MAX_QUOTED]}: {first.reason}.") from error
