"""`GET /response/{id}`: the last response of a job that is polled."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ndif.gateway.refusal import Refusal
from ndif.stores.objects import ObjectStore

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Responses:
    """The last response of each job that nobody waits for on a live channel."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def routes(self) -> list[BaseRoute]:
        """Where it answers."""
        return [Route("/response/{id}", self.response, methods=["GET"])]

    async def response(self, http: Request) -> Response:
        """What was said of a job last."""
        request_id = job_id(http)
        content = await self._store.get(f"responses/{request_id}.json")
        if content is None:
            raise Refusal(
                404,
                f"No job {request_id} is known here. Only jobs sent with blocking=False are kept, for "
                f"{self._store.ttl_s:g} seconds.",
            )
        return Response(content, media_type="application/json")


def job_id(http: Request) -> str:
    """The id in the path.

    Raises:
        Refusal: if it is none.
    """
    request_id: str = http.path_params["id"]
    if not is_job_id(request_id):
        raise Refusal(404, f"{request_id[:64]!r} is not the id of a job.")
    return request_id


def is_job_id(text: str) -> bool:
    """Whether it has the form of one."""
    return _ID.fullmatch(text) is not None
