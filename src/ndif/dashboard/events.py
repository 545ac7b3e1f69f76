"""`GET /dashboard/events` and `GET /dashboard/state`: the state of the server, live and once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.dashboard.access import Access, Viewer
from ndif.dashboard.feed import Feed, Subscriber, event_of
from ndif.dashboard.server_facts import ServerFacts
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import HttpError
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.openapi import ApiRoute, DescribedChannel, Description, EventsRoute
from ndif.schema.answer import project
from ndif.schema.limits import KeyLimits
from ndif.schema.public_state import State
from ndif.stores.accounts import AccountsUnavailableError, NoSuchKeyError, TooManyGuessesError
from ndif.tasks import end

_BEAT_S = 15.0
"""Seconds between heartbeats of an idle stream, and between checks of its viewer's access."""
_BEAT = b":\n\n"
_STATE = Description(
    "the server",
    "The state that the dashboard shows",
    f"{name_of('dashboard')} sets whether all clients may read it, or only users with an API key.",
    refusals={
        401: "The API key is missing or unknown.",
        429: "Too many wrong keys came from this address.",
        503: "No process of this server leads at the moment.",
    },
    needs="key",
)
_EVENTS = DescribedChannel(
    "/dashboard/events (the state, live)",
    "Server-sent events. An event has the name of a part of the answer of `GET /dashboard/state`, and the "
    "complete part as its data. All parts except `server` are sent first, then each part that changes. "
    "`me` describes the user of the key, `jobs` contains only that user's unfinished jobs, in the form of "
    "`GET /requests`, and `away` has the reason, as a sentence, if the state is unavailable.",
)


@dataclass(frozen=True)
class EventRoutes:
    """Routes that send the state to permitted viewers."""

    settings: Settings
    access: Access
    feed: Feed
    facts: ServerFacts
    channels: OpenChannels

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            ApiRoute("/dashboard/state", self.state, _STATE),
            EventsRoute("/dashboard/events", self.events, _EVENTS),
        ]

    async def state(self, http: Request) -> State:
        """Answer with the current state."""
        await self.access.viewer(http)
        return project(State, await self.feed.state(), server=await self.facts.describe())

    async def events(self, http: Request) -> Response:
        """Answer with a stream of the state and its changes."""
        viewer = await self.access.viewer(http)
        return _EventStream(self, http, viewer, event_of("me", self._me(viewer)))

    def _me(self, viewer: Viewer) -> Mapping[str, Any]:
        account = viewer.account
        if account is None or viewer.user is None:
            return {"known": False}
        return {
            "known": True,
            "email": account.email,
            "tags": account.tags,
            "limits": KeyLimits.of(self.settings, account.limits).model_dump(),
        }


class _EventStream(Response):
    """An event stream that ends when its client leaves, the server stops or the viewer loses access."""

    def __init__(self, routes: EventRoutes, http: Request, viewer: Viewer, first: bytes) -> None:
        super().__init__(
            media_type="text/event-stream",
            # A proxy that buffers answers would delay every event.
            headers={"X-Accel-Buffering": "no"},
        )
        del self.headers["Content-Length"]
        self._routes = routes
        self._http = http
        self._viewer = viewer
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller, account = caller_of(self._http), self._viewer.account
        with (
            self._routes.channels.count(caller, account),
            self._routes.feed.subscribe(self._viewer.user) as subscriber,
        ):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            leaving = asyncio.create_task(_wait_for_disconnect(receive, subscriber), name="page")
            try:
                await _send_part(send, self._first)
                looked_up = time.monotonic()
                while not subscriber.is_closed:
                    content = await subscriber.next(_BEAT_S)
                    if time.monotonic() - looked_up >= _BEAT_S:
                        if not await self._may_see():
                            break
                        looked_up = time.monotonic()
                    await _send_part(send, content or _BEAT)
                await _send_part(send, b"", more=False)
            finally:
                await end([leaving])

    async def _may_see(self) -> bool:
        """Return False if the viewer's key was revoked, or an operator's session has expired."""
        try:
            viewer = await self._routes.access.viewer(self._http)
        except AccountsUnavailableError:
            return True  # the key was valid, and may still be valid
        except (HttpError, NoSuchKeyError, TooManyGuessesError):
            return False
        return viewer.user == self._viewer.user


async def _wait_for_disconnect(receive: Receive, subscriber: Subscriber) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    subscriber.close()


async def _send_part(send: Send, content: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": more})
