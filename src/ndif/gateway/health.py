"""Routes that tell clients of the server: is it up, which models it serves, what is installed."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ndif.gateway.catalogue import Catalogue
from ndif.gateway.http_error import RETRY_SOON, HttpError
from ndif.stores.accounts import Accounts, NoSuchKeyError


@dataclass(frozen=True)
class HealthRoutes:
    """`/ping`, `/connected`, `/status`, `/env` and `/whoami`: answered from catalogue and accounts."""

    catalogue: Catalogue
    accounts: Accounts

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        answers = self.ping, self.connected, self.status, self.env, self.whoami
        return [Route(f"/{answer.__name__}", answer) for answer in answers]

    async def ping(self, _: Request) -> Response:
        """Answer that the server is up."""
        return JSONResponse("pong")

    async def connected(self, _: Request) -> Response:
        """Answer 200 once the server can run jobs, 503 before."""
        if not await self.catalogue.connected():
            raise HttpError(503, "No model is ready yet; /status shows its progress.", RETRY_SOON)
        return JSONResponse(True)

    async def status(self, _: Request) -> Response:
        """Answer with the models and their state."""
        return JSONResponse(await self.catalogue.status())

    async def env(self, _: Request) -> Response:
        """Answer with the versions of Python and of the installed packages."""
        return JSONResponse(await asyncio.to_thread(environment))

    async def whoami(self, http: Request) -> Response:
        """Answer with the email and the rights of the API key's holder."""
        key = http.headers.get("ndif-api-key", "")
        try:
            account = await self.accounts.account(key, http.client.host if http.client else "")
        except NoSuchKeyError:
            return JSONResponse({"email": None, "tags": []})
        return JSONResponse({"email": account.email, "tags": account.tags})


@cache
def environment() -> dict[str, Any]:
    """Return Python's and the packages' versions by import name, which `nnsight.compare()` compares."""
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
