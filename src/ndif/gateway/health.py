"""Routes about the server itself: liveness, models, installed packages, the holder of a key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from ndif.control.leader import Catalogue
from ndif.gateway.answers import READY, Identity, PythonEnvironment
from ndif.gateway.caller import caller_of
from ndif.gateway.environment import environment
from ndif.gateway.http_error import RETRY_SOON, HttpError
from ndif.gateway.openapi import Answer, ApiRoute, Description, Parameter, json_response
from ndif.host.runtimes import Runtime, Runtimes
from ndif.schema.client_status import ServerStatus
from ndif.schema.states import DeploymentLevel
from ndif.stores.accounts import Accounts, NoSuchKeyError

_GENERATIONS_BY_LIBRARY = {"python-httpx": ("0.8",), "python-requests": ("0.7", "0.6")}
"""Generations of the clients that use an HTTP library; these requests do not name the client's version."""
_MAX_QUOTED = 100
"""Characters of a client's text that an answer repeats."""


_NO_LEADER = "This server has no leader at the moment."
_DESCRIPTIONS = {
    "ping": Description(
        "the server",
        "Is the server up?",
        "On a public server, pages of any site may read this, `/status` and `/env`.",
        answers={200: Answer({"const": "pong"}, "The server is up.", example="pong")},
    ),
    "connected": Description(
        "the server",
        "Can the server run jobs?",
        answers={200: Answer({"const": True}, "The server can run jobs.", example=True)},
        refusals={503: "The server cannot run jobs yet."},
    ),
    "status": Description(
        "the server",
        "The models and their state",
        refusals={503: _NO_LEADER},
    ),
    "env": Description(
        "the server",
        "Python and the packages that run blocks",
        "`nnsight.compare()` compares the client's packages with these.",
        answers={200: Answer(PythonEnvironment)},
        parameters=(
            Parameter(
                "generation",
                "query",
                "nnsight generation; by default one that uses the client's HTTP library, else the newest.",
                "0.8",
            ),
        ),
        refusals={404: "This nnsight generation is not installed."},
    ),
    "whoami": Description(
        "the server",
        "The holder of the API key",
        refusals={429: "Too many wrong keys came from this address."},
        needs="key",
    ),
}


@dataclass(frozen=True)
class HealthRoutes:
    """`/ping`, `/connected`, `/status`, `/env` and `/whoami`."""

    catalogue: Catalogue
    accounts: Accounts
    runtimes: Runtimes

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        handlers = self.ping, self.connected, self.status, self.env, self.whoami
        return [
            ApiRoute(f"/{handler.__name__}", handler, _DESCRIPTIONS[handler.__name__])
            for handler in handlers
        ]

    async def ping(self, _: Request) -> str:
        """Answer that the server is up."""
        return "pong"

    async def connected(self, _: Request) -> bool:
        """Answer True once the server can run jobs; raise an `HttpError` (503) before."""
        if not await self.catalogue.connected():
            raise HttpError(503, "No model is ready yet; /status shows its progress.", RETRY_SOON)
        return True

    async def status(self, http: Request) -> ServerStatus:
        """Answer with the models; add `READY` if none is HOT and requests may load models."""
        status = await self.catalogue.status()
        models = status.deployments.values()
        is_idle = all(model.deployment_level is not DeploymentLevel.HOT for model in models)
        if is_idle and await self._loads_on_request(http):
            status = ServerStatus(deployments={**status.deployments, READY.model_key: READY})
        return status

    async def _loads_on_request(self, http: Request) -> bool:
        """Return True if requests may load models; True on a server with keys, where the key decides."""
        if (await self.catalogue.models()).fixed:
            return False
        try:
            return (await self.accounts.account(replace(caller_of(http), key=""))).hotswapping
        except NoSuchKeyError:
            return True

    async def env(self, http: Request) -> Response:
        """Answer with the versions of Python and of the packages that run the client's blocks."""
        packages = await asyncio.to_thread(self._env, http)
        return json_response(packages, headers={"Vary": "User-Agent"})

    def _env(self, http: Request) -> PythonEnvironment:
        return environment(
            _runtime(
                self.runtimes.installed(),
                http.query_params.get("generation"),
                http.headers.get("user-agent", ""),
            )
        )

    async def whoami(self, http: Request) -> Identity:
        """Answer with the email and the rights of the API key's holder."""
        try:
            account = await self.accounts.account(caller_of(http))
        except NoSuchKeyError:
            return Identity(email=None, tags=[])
        return Identity(email=account.email, tags=account.tags)


def _runtime(
    installed: Mapping[str, Runtime], generation: str | None, user_agent: str
) -> Runtime | None:
    """Return the named generation's runtime, else one for the client's HTTP library, else the newest."""
    if generation:
        if generation not in installed:
            raise HttpError(
                404,
                f"nnsight {generation[:_MAX_QUOTED]} is not installed here; "
                f"{', '.join(installed) or 'none'} is.",
            )
        return installed[generation]
    library = user_agent.partition("/")[0].lower()
    names = (*_GENERATIONS_BY_LIBRARY.get(library, ()), *installed)
    return next((installed[name] for name in names if name in installed), None)
