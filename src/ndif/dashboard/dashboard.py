"""The dashboard of one gateway process."""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from ndif.config.settings import Settings
from ndif.dashboard.access import Access, mode_of
from ndif.dashboard.events import EventRoutes
from ndif.dashboard.feed import Feed, Next
from ndif.dashboard.pages import PAGE, DashboardFiles
from ndif.dashboard.server_facts import ServerFacts
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.openapi import ApiRoute
from ndif.host.runtimes import Runtimes
from ndif.schema.answer import to_plain
from ndif.stores.accounts import Accounts


class Dashboard:
    """The page at `/`, its files and its live state.

    Owns the feed, which requests the state while pages are open. The page cancels jobs and downloads
    results through the routes for all clients.
    """

    def __init__(
        self,
        settings: Settings,
        accounts: Accounts,
        runtimes: Runtimes,
        next_state: Next,
        *,
        host: str,
        many_users: bool,
    ) -> None:
        """Prepare the dashboard of a server that listens on `host`; no task runs until a page is open.

        `many_users`: True for a server of many users, False for a server of one user.
        """
        mode = mode_of(settings, host, many_users=many_users)
        self.access = Access(mode, accounts)
        self.pages = DashboardFiles()
        self._operators_at: tuple[int, ...] | None = ()
        """Ports that serve the operator's routes; None for every port."""
        self._feed = Feed(next_state)
        self._facts = ServerFacts(runtimes, mode, many_users and not settings.dev_mode)
        self._events = EventRoutes(
            settings, self.access, self._feed, self._facts, OpenChannels(settings)
        )

    def admit(self, is_operator: Callable[[HTTPConnection], bool], port: int | None) -> None:
        """Admit operators, and show their views on `port`; None: on every port."""
        self.access.checks.append(is_operator)
        self._operators_at = (port,) if port is not None else None

    def routes(self) -> list[BaseRoute]:
        """Return the routes; an empty list if the dashboard is off."""
        if self.access.mode == "off":
            return []
        return [ApiRoute("/", self.index, PAGE), *self._events.routes(), *self.pages.routes()]

    async def index(self, http: Request) -> Response:
        """Answer with the page, without a login: the page contains only public facts."""
        facts = json.dumps(to_plain(await self._facts.describe()))
        _, port = http.scope.get("server") or ("", None)
        has_operator_routes = self._operators_at is None or port in self._operators_at
        return self.pages.page(
            "index.html",
            http,
            server=facts,
            operators="here" if has_operator_routes else "elsewhere",
        )

    def close(self) -> None:
        """End the streams of open pages."""
        self._feed.close()
