"""What clients ask before they send a job: is it up, what does it serve, what is installed."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import Distribution, distributions
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ndif.gateway.catalogue import Catalogue
from ndif.gateway.refusal import Refusal
from ndif.stores.accounts import Accounts, NoSuchKeyError

_NOT_YET = "No model is ready yet; /status says how far it is."
_RETRY_S = 5


class Health:
    """`/ping`, `/connected`, `/status`, `/env` and `/whoami` (specification, section 3.3)."""

    def __init__(
        self,
        catalogue: Catalogue,
        accounts: Accounts,
    ) -> None:
        self._catalogue = catalogue
        self._accounts = accounts
        self._environment: dict[str, Any] | None = None

    def routes(self) -> list[BaseRoute]:
        """Where they answer."""
        return [
            Route("/ping", self.ping, methods=["GET"]),
            Route("/connected", self.connected, methods=["GET"]),
            Route("/status", self.status, methods=["GET"]),
            Route("/env", self.env, methods=["GET"]),
            Route("/whoami", self.whoami, methods=["GET"]),
        ]

    async def ping(self, _: Request) -> Response:
        """The server answers."""
        return JSONResponse("pong")

    async def connected(self, _: Request) -> Response:
        """A model is ready to run jobs."""
        if not await self._catalogue.connected():
            raise Refusal(503, _NOT_YET, retry_after_s=_RETRY_S)
        return JSONResponse(True)

    async def status(self, _: Request) -> Response:
        """The models and their state."""
        return JSONResponse(await self._catalogue.status())

    async def env(self, _: Request) -> Response:
        """Python and the installed packages, by the names they are imported by."""
        if self._environment is None:
            self._environment = await asyncio.to_thread(environment)
        return JSONResponse(self._environment)

    async def whoami(self, http: Request) -> Response:
        """Whose the API key is."""
        key = http.headers.get("ndif-api-key", "")
        try:
            account = await self._accounts.account(key, http.client.host if http.client else "")
        except NoSuchKeyError:
            return JSONResponse({"email": None, "tags": []})
        return JSONResponse({"email": account.email, "tags": account.tags})


def environment() -> dict[str, Any]:
    """What `nnsight.compare()` sets beside the client's own."""
    packages: dict[str, str] = {}
    for distribution in distributions():
        for name in _import_names(distribution):
            packages.setdefault(name, distribution.version)
    return {"python_version": sys.version, "packages": dict(sorted(packages.items()))}


def _import_names(distribution: Distribution) -> set[str]:
    listed = distribution.read_text("top_level.txt")
    names = set(listed.split()) if listed else set()
    if not names:
        names = {
            file.parts[0].partition(".")[0]
            for file in distribution.files or ()
            if file.suffix in (".py", ".so")
        }
    names = {name for name in names if name.isidentifier()}
    return names or {distribution.metadata["Name"]}
