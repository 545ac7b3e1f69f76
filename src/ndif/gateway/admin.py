"""`/admin/*`: the operator's operations over HTTP, for the server's token or an operator's login."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from ndif.config.reference import Variable, name_of, variables
from ndif.config.settings import Settings
from ndif.control.account_operations import ACCOUNT_OPERATIONS, AccountOperation, perform_on
from ndif.control.audit_events import events_of
from ndif.control.operations import OPERATIONS, Operation, Perform, parse_operation
from ndif.gateway.incoming import read_body
from ndif.gateway.openapi import (
    JSON,
    Answer,
    ApiRoute,
    Content,
    Description,
    Parameter,
    example_of,
    json_response,
)
from ndif.gateway.operator import AuthenticatedOperator, Operators
from ndif.schema.answer import answer
from ndif.schema.deployment import OperationError
from ndif.stores.accounts import Registry
from ndif.stores.events import RecordEvents

_MAX_BODY_BYTES = 4 * 1024**2

Handler = Callable[[Request, AuthenticatedOperator], Awaitable[Any]]


@answer(
    example={
        "settings": [
            {
                "name": name_of("result_ttl_s"),
                "value": 86400,
                "default": 86400,
                "source": "default",
                "meaning": "Time that a result and its signed URL stay valid.",
                "unit": "seconds",
            }
        ]
    }
)
class Configuration:
    """The server's settings."""

    settings: list[Variable]


_TAG = "the operator's routes"
_ACCOUNTS_TAG = "users, keys and tiers"
_REFUSALS = {
    400: "The body is not valid.",
    401: "The token is missing or wrong, and there is no login.",
    403: "A login's request comes from another page, or lacks its `X-CSRF-Token`.",
    404: "There is no such model, replica or job.",
    409: "The server cannot do this now.",
    503: "This server has no leader at the moment.",
}
_ACCOUNTS_REFUSALS = {
    400: "The body or the query is not valid.",
    401: _REFUSALS[401],
    403: _REFUSALS[403],
    404: "There is no such user, key or tier.",
    409: "The server has no database of API keys, or its users, keys and tiers do not allow this.",
    503: "The database of API keys does not answer.",
}
_CONFIG = Description(
    _TAG,
    "Every variable, its value and the value's source",
    answers={200: Answer(Configuration, "The settings; secrets are hidden.")},
    refusals={401: _REFUSALS[401]},
    needs="token",
)


def _describe(
    kind: type[Operation | AccountOperation], tag: str, refusals: Mapping[int, str]
) -> Description:
    """Return the description of an operation's route."""
    is_query = kind.method == "GET"
    return Description(
        tag,
        inspect.cleandoc(kind.__doc__ or "").partition("\n")[0].removesuffix("."),
        answers={200: Answer(kind.answer)},
        parameters=tuple(_query_parameters(kind)) if is_query else (),
        body={JSON: Content(kind)} if kind.model_fields and not is_query else {},
        refusals=refusals,
        needs="token",
    )


def _query_parameters(kind: type[BaseModel]) -> Iterator[Parameter]:
    """Yield the fields of a read-only operation as query parameters."""
    schemas = kind.model_json_schema().get("properties", {})
    for name, field in kind.model_fields.items():
        # A query cannot say null, so show the schema's other alternative.
        schema = schemas[name].get("anyOf", [schemas[name]])[0]
        yield Parameter(
            name,
            "query",
            field.description or "",
            example_of(kind)[name],
            {key: value for key, value in schema.items() if key not in ("title", "description")},
            required=field.is_required(),
        )


class AdminRoutes:
    """Routes for operators: one per operation, on deployments or accounts, and one for the settings."""

    def __init__(
        self,
        perform: Perform,
        operators: Operators,
        settings: Settings,
        registry: Registry | None = None,
        record: RecordEvents | None = None,
    ) -> None:
        """Perform operations with `perform`, and account operations on `registry`; log with `record`.

        Without a `registry`, account operations are refused; without `record`, no events are logged.
        """
        self._registry = registry
        self._perform = perform
        self._operators = operators
        self._settings = settings
        self._record = record

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            ApiRoute("/admin/config", self._for_operators(self.config), _CONFIG),
            *(
                ApiRoute(
                    f"/admin/{kind.name}",
                    self._for_operators(self._handler(kind)),
                    _describe(kind, _TAG, _REFUSALS),
                    kind.method,
                )
                for kind in OPERATIONS
            ),
            *(
                ApiRoute(
                    f"/admin/{kind.name}",
                    self._for_operators(self._account_handler(kind)),
                    _describe(kind, _ACCOUNTS_TAG, _ACCOUNTS_REFUSALS),
                    kind.method,
                )
                for kind in ACCOUNT_OPERATIONS
            ),
        ]

    async def config(self, _: Request, __: AuthenticatedOperator) -> dict[str, Any]:
        """Answer with the server's settings, and the source of each value."""
        return {"settings": [asdict(variable) for variable in variables(self._settings)]}

    def _handler(self, kind: type[Operation]) -> Handler:
        async def handle(http: Request, operator: AuthenticatedOperator) -> Any:
            # An operation without fields has no body.
            operation = parse_operation(kind, await _body(http)) if kind.model_fields else kind()
            answer = await self._perform(operation)
            await self._record_events(operation, answer, operator)
            return answer

        return handle

    def _account_handler(self, kind: type[AccountOperation]) -> Handler:
        async def handle(http: Request, operator: AuthenticatedOperator) -> Any:
            is_query = kind.method == "GET"
            content = dict(http.query_params) if is_query else await _body(http) or b"{}"
            operation = parse_operation(kind, content)
            answer = await perform_on(self._registry, operation)
            try:
                if (following := operation.next_operation(answer)) is not None:
                    answer = operation.after_next_operation(answer, await self._perform(following))
            except OperationError as error:
                await self._record_events(operation, answer, operator)
                raise OperationError(
                    error.status, f"The key is changed, but its jobs go on: {error} Try again."
                ) from error
            await self._record_events(operation, answer, operator)
            return answer

        return handle

    async def _record_events(
        self, operation: Operation | AccountOperation, answer: Any, operator: AuthenticatedOperator
    ) -> None:
        if self._record is not None and (events := events_of(operation, answer, operator.by)):
            await self._record(events)

    def _for_operators(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(http: Request) -> Response:
            operator = self._operators.of(http)
            return json_response(await handler(http, operator))

        return answer


async def _body(http: Request) -> bytes:
    return await read_body(http, _MAX_BODY_BYTES, "The request is larger than 4 MiB.")
