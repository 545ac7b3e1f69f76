"""`/admin/*`: what an operator asks of a running server, behind the token that it made when it started."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ndif.config import Settings
from ndif.gateway.refusal import Refusal
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_file import DeploymentFileError, from_value
from ndif.schema.operation import OperationError
from ndif.variables import variables

_GENERATION = r"^\d+\.\d+$"
_MAX_BODY_BYTES = 4 * 1024**2
_SHOWN = 100
_EXPORT_VERSION = 1

_UNKNOWN = (
    "This needs the server's token, as `Authorization: Bearer TOKEN`. `ndif start` writes it to the file "
    "`token` in its session's folder; from another machine, give it to the command with --token."
)


class Operations(Protocol):
    """What carries an operator's wishes out. Each raises `OperationError` for what must be said of it."""

    async def deploy(
        self,
        configs: Sequence[DeploymentConfig],
        generation: str | None,
        *,
        wait: bool,
        sync: bool,
    ) -> list[dict[str, Any]]:
        """Deploy the models; with `sync`, evict what is deployed and not among them.

        With `wait` it returns when every replica is ready or has failed.
        """
        ...

    async def evict(
        self, model: str, replica_id: str | None, *, cold: bool
    ) -> list[dict[str, Any]]:
        """Take a model, or one replica of it, off its devices; `cold`: out of the memory as well."""
        ...

    async def scale(
        self, model: str, replicas: int, generation: str | None
    ) -> list[dict[str, Any]]:
        """Have as many replicas of a model."""
        ...

    async def restart(self, model: str) -> list[dict[str, Any]]:
        """Start a model's replicas anew."""
        ...

    async def kill(self, request_id: str) -> bool:
        """End a request that waits or runs; False if there is none of that id."""
        ...

    async def status(self) -> dict[str, Any]:
        """Nodes, models, replicas, schedule."""
        ...

    async def queue(self) -> dict[str, Any]:
        """What runs and waits, model by model."""
        ...

    async def export(self) -> list[dict[str, Any]]:
        """Entries of a deployment file that brings up what is deployed now."""
        ...

    async def stop(self) -> None:
        """End the server as SIGTERM does."""
        ...


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Deploy(_Body):
    """The body of `/admin/deploy`."""

    deployments: list[Any] | dict[str, Any]
    generation: str | None = Field(default=None, pattern=_GENERATION)
    wait: bool = False
    sync: bool = False


class Evict(_Body):
    """The body of `/admin/evict`."""

    model: str = Field(min_length=1)
    replica: str | None = Field(default=None, min_length=1)
    cold: bool = False


class Scale(_Body):
    """The body of `/admin/scale`."""

    model: str = Field(min_length=1)
    replicas: int = Field(ge=0)
    generation: str | None = Field(default=None, pattern=_GENERATION)


class Restart(_Body):
    """The body of `/admin/restart`."""

    model: str = Field(min_length=1)


class Kill(_Body):
    """The body of `/admin/kill`."""

    request_id: str = Field(min_length=1)


Body = TypeVar("Body", bound=_Body)
_Handler = Callable[[Request], Awaitable[dict[str, Any]]]


class Admin:
    """The routes; every one of them wants `token`."""

    def __init__(self, operations: Operations, token: str, settings: Settings) -> None:
        if not token:
            raise ValueError("an empty token would let everyone in")
        self._operations = operations
        self._token = token.encode()
        self._settings = settings

    def routes(self) -> list[BaseRoute]:
        """Where they answer."""
        asked: dict[str, _Handler] = {
            "status": self.status,
            "queue": self.queue,
            "config": self.config,
            "export": self.export,
        }
        done: dict[str, _Handler] = {
            "deploy": self.deploy,
            "evict": self.evict,
            "scale": self.scale,
            "restart": self.restart,
            "kill": self.kill,
            "stop": self.stop,
        }
        return [
            Route(f"/admin/{name}", self._guarded(handler), methods=[method])
            for method, handlers in (("GET", asked), ("POST", done))
            for name, handler in handlers.items()
        ]

    async def status(self, _: Request) -> dict[str, Any]:
        """See `Operations.status`."""
        return await self._operations.status()

    async def queue(self, _: Request) -> dict[str, Any]:
        """See `Operations.queue`."""
        return await self._operations.queue()

    async def config(self, _: Request) -> dict[str, Any]:
        """The server's variables, and where each value came from."""
        return {"settings": [asdict(variable) for variable in variables(self._settings)]}

    async def export(self, _: Request) -> dict[str, Any]:
        """See `Operations.export`."""
        return {"version": _EXPORT_VERSION, "deployments": await self._operations.export()}

    async def deploy(self, http: Request) -> dict[str, Any]:
        """See `Operations.deploy`."""
        body = await _body(http, Deploy)
        try:
            configs = from_value(body.deployments, "deployments")
        except DeploymentFileError as error:
            raise Refusal(400, str(error)) from error
        if not configs:
            raise Refusal(400, "The request names no model to deploy.")
        models = await self._operations.deploy(
            configs, body.generation, wait=body.wait, sync=body.sync
        )
        return {"models": models}

    async def evict(self, http: Request) -> dict[str, Any]:
        """See `Operations.evict`."""
        body = await _body(http, Evict)
        return {
            "evicted": await self._operations.evict(body.model, body.replica, cold=body.cold),
        }

    async def scale(self, http: Request) -> dict[str, Any]:
        """See `Operations.scale`."""
        body = await _body(http, Scale)
        models = await self._operations.scale(body.model, body.replicas, body.generation)
        return {"models": models}

    async def restart(self, http: Request) -> dict[str, Any]:
        """See `Operations.restart`."""
        body = await _body(http, Restart)
        return {"restarted": await self._operations.restart(body.model)}

    async def kill(self, http: Request) -> dict[str, Any]:
        """See `Operations.kill`."""
        body = await _body(http, Kill)
        if not await self._operations.kill(body.request_id):
            raise Refusal(
                404,
                f"No request {body.request_id[:_SHOWN]!r} waits or runs here; `ndif queue` lists those "
                "that do.",
            )
        return {"killed": True}

    async def stop(self, _: Request) -> dict[str, Any]:
        """See `Operations.stop`."""
        await self._operations.stop()
        return {"stopping": True}

    def _guarded(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(http: Request) -> Response:
            if not self._is_known(http.headers.get("authorization", "")):
                return JSONResponse({"detail": _UNKNOWN}, 401, {"WWW-Authenticate": "Bearer"})
            try:
                return JSONResponse(await handler(http))
            except OperationError as error:
                raise Refusal(error.status, str(error)) from error
            except ClientDisconnect:
                return Response(status_code=400)

        return answer

    def _is_known(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # Headers are Latin-1 to Starlette; what is not in it was never a token of ours.
        return scheme.lower() == "bearer" and secrets.compare_digest(
            given.strip().encode(errors="replace"), self._token
        )


async def _body(http: Request, kind: type[Body]) -> Body:
    content = bytearray()
    async for chunk in http.stream():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            raise Refusal(413, "The request is larger than 4 MiB.", close=True)
    try:
        return kind.model_validate_json(bytes(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"][:1]) or "the body"
        known = ", ".join(kind.model_fields)
        what = {
            "extra_forbidden": f"it is no field of this request; there are: {known}",
            "string_pattern_mismatch": 'it must be a generation of nnsight, like "0.8"',
        }.get(first["type"], first["msg"])
        raise Refusal(400, f"The request is not valid: {where[:_SHOWN]}: {what}.") from error
