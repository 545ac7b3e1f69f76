"""Builds the OpenAPI 3.1 document from the descriptions of the routes.

Each route is described where it is defined. An `ApiRoute` has a `Description` of its one method. A live
channel has a `DescribedChannel` in prose, because OpenAPI cannot describe WebSocket messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp

from ndif.schema.answer import JsonObject, adapter, answer, to_json
from ndif.telemetry.request_id import HEADER

VERSION = "3.1.0"
JSON = "application/json"
BYTES = "application/octet-stream"

_REF = "#/components/schemas/{model}"
REFUSAL = _REF.format(model="Refusal")
"""Reference to the schema of a refusal."""
_ABOUT = """\
Runs nnsight traces next to large models. Clients are the released packages of nnsight: \
0.8 sends multipart bodies and listens at /subscribe, 0.6 and 0.7 send headers and listen at /ws/socket.io.

Every refusal is `{"detail": "A sentence that says what to do."}`; `4XX` and `5XX` stand for refusals \
of any route. 400: the request is not valid. 403: the Host is not a name of this server, or a page of \
another site sent the request. 414 and 431: the address or the headers are too long. 429 and 503, with \
Retry-After: the request may succeed later. 500: the server failed. Every answer has an `X-Request-Id`: \
the client's own, if it has at most 64 letters, digits and any of `_.:-`. HEAD is answered like GET, \
without the body."""


@answer(example={"detail": "There is nothing at /nowhere."})
class Refusal:
    """A request is refused."""

    detail: str


@dataclass(frozen=True, slots=True)
class Content:
    """A body; `schema` is an answer type, a pydantic model or a JSON Schema."""

    schema: Any
    example: Any = None
    """None: the example of the type itself."""
    encoding: Mapping[str, Any] = field(default_factory=dict)
    """OpenAPI's `encoding` of a multipart body, for media types that do not follow from the schema."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a route, other than a refusal."""

    schema: Any
    text: str = "The answer."
    example: Any = None
    media_types: Sequence[str] = (JSON,)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Meaning of each header that only this route sends."""

    @property
    def content(self) -> Mapping[str, Content]:
        """The bodies by media type."""
        return dict.fromkeys(self.media_types, Content(self.schema, self.example))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path, the query or a header."""

    name: str
    place: Literal["path", "query", "header"]
    text: str
    example: Any
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    required: bool = False
    """True if requests without the parameter are refused; path parameters are always required."""

    def described(self) -> JsonObject:
        """Return the OpenAPI parameter object."""
        return {
            "name": self.name,
            "in": self.place,
            "description": self.text,
            "required": self.required or self.place == "path",
            "schema": dict(self.schema),
            "example": self.example,
        }


@dataclass(frozen=True, slots=True)
class Description:
    """The description of one method of a route."""

    tag: str
    summary: str
    text: str = ""
    answered: str = "The answer."
    """Meaning of the status 200, if the handler's annotation gives the type of the answer."""
    answers: Mapping[int, Answer] = field(default_factory=dict)
    """Answers by status, if the handler's annotation is a `Response`, which does not describe them."""
    parameters: Sequence[Parameter] = ()
    body: Mapping[str, Content] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    """Reason of each refusal that is specific to this route, by status."""
    needs: Literal["nothing", "key", "token"] = "nothing"
    """`key`: an API key, if the server has keys; `token`: the operator's token."""


@dataclass(frozen=True, slots=True)
class DescribedChannel:
    """The description of a live channel, in prose."""

    name: str
    text: str


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer as a JSON response."""
    return Response(to_json(value), status, headers, media_type=JSON)


class ApiRoute(Route):
    """A route of one method, with its OpenAPI description.

    The handler returns a `Response`, or an answer that its annotation describes and that is sent as JSON.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Any], Any],
        description: Description,
        method: str = "GET",
    ) -> None:
        kind = get_type_hints(endpoint)["return"]
        if not (isinstance(kind, type) and issubclass(kind, Response)):
            endpoint = partial(_respond, endpoint)
            if not description.answers:
                answers = {200: Answer(kind, description.answered)}
                description = replace(description, answers=answers)
        super().__init__(path, endpoint, methods=[method])
        self.method = method
        self.description = description


class LiveRoute(WebSocketRoute):
    """A WebSocket with its description."""

    def __init__(self, path: str, endpoint: Any, channel: DescribedChannel) -> None:
        super().__init__(path, endpoint)
        self.channel = channel


class EventsRoute(Route):
    """A stream of server-sent events with its description."""

    def __init__(self, path: str, endpoint: Any, channel: DescribedChannel) -> None:
        super().__init__(path, endpoint, methods=["GET"])
        self.channel = channel


class LiveMount(Mount):
    """A live channel that a separate ASGI application serves, with its description."""

    def __init__(self, path: str, app: ASGIApp, channel: DescribedChannel) -> None:
        super().__init__(path, app=app)
        self.channel = channel


async def _respond(handler: Callable[[Request], Awaitable[Any]], http: Request) -> Response:
    return json_response(await handler(http))


def document(routes: Iterable[BaseRoute], version: str) -> JsonObject:
    """Return the OpenAPI document of these routes; `version` is the server's."""
    api_routes = list(_described(routes))
    channels = list(_channels(routes))
    schemas, components = _schemas(kind for _, route in api_routes for kind in _types(route))
    paths: dict[str, JsonObject] = {}
    for path, route in api_routes:
        paths.setdefault(path, {})[route.method.lower()] = _operation(path, route, schemas)
    tags = list(dict.fromkeys(route.description.tag for _, route in api_routes))
    return {
        "openapi": VERSION,
        "info": {"title": "ndif", "version": version, "description": _ABOUT},
        "tags": [
            *({"name": tag} for tag in tags),
            *({"name": channel.name, "description": channel.text} for channel in channels),
        ],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {
                HEADER: {
                    "description": "Id of this request, which the server's log names, too.",
                    "schema": {"type": "string", "maxLength": 64},
                }
            },
            "securitySchemes": {
                "key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "ndif-api-key",
                    "description": "A user's API key, where the server has keys.",
                },
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The token that the server made when it started.",
                },
            },
        },
    }


def _described(routes: Iterable[BaseRoute], prefix: str = "") -> Iterator[tuple[str, ApiRoute]]:
    """Yield each `ApiRoute` after its full OpenAPI path, mounted routes included."""
    for route in routes:
        if isinstance(route, ApiRoute):
            yield prefix + route.path_format, route
        elif isinstance(route, Mount):
            yield from _described(route.routes, prefix + route.path_format.removesuffix("/{path}"))


def _channels(routes: Iterable[BaseRoute]) -> Iterator[DescribedChannel]:
    return (
        route.channel for route in routes if isinstance(route, LiveRoute | LiveMount | EventsRoute)
    )


def _types(route: ApiRoute) -> Iterator[Any]:
    """Yield the types of a route's bodies and answers; bodies given as JSON Schema have none."""
    described = route.description
    contents = [described.body, *(response.content for response in described.answers.values())]
    for content in (body for by_type in contents for body in by_type.values()):
        if not isinstance(content.schema, Mapping):
            yield content.schema


def _schemas(types: Iterable[Any]) -> tuple[dict[Any, JsonObject], JsonObject]:
    """Return a reference to each type's schema, and the definitions for `components/schemas`."""
    distinct: list[Any] = list(dict.fromkeys((Refusal, *types)))
    references, definitions = TypeAdapter.json_schemas(
        [(index, "validation", adapter(kind)) for index, kind in enumerate(distinct)],
        ref_template=_REF,
    )
    schemas = {kind: references[index, "validation"] for index, kind in enumerate(distinct)}
    return schemas, definitions["$defs"]


def _operation(path: str, route: ApiRoute, schemas: Mapping[Any, JsonObject]) -> JsonObject:
    described = route.description

    def content(by_type: Mapping[str, Content]) -> JsonObject:
        return {media_type: _content(body, schemas) for media_type, body in by_type.items()}

    refused = content({JSON: Content(Refusal)})
    usual = {HEADER: {"$ref": f"#/components/headers/{HEADER}"}}
    responses: JsonObject = {}
    for status, response in described.answers.items():
        own_headers = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in response.headers.items()
        }
        responses[str(status)] = {
            "description": response.text,
            "headers": {**usual, **own_headers},
            "content": content(response.content),
        }
    refusals = {
        **{str(status): text for status, text in described.refusals.items()},
        "4XX": "The request is refused.",
        "5XX": "The server cannot answer now.",
    }
    for code, text in refusals.items():
        responses.setdefault(
            code, {"description": text, "headers": dict(usual), "content": refused}
        )
    operation: JsonObject = {
        "operationId": f"{route.method.lower()}{path.translate(_UNDERSCORES)}",
        "summary": described.summary,
        "tags": [described.tag],
        "responses": responses,
    }
    if described.text:
        operation["description"] = described.text
    if described.parameters:
        operation["parameters"] = [parameter.described() for parameter in described.parameters]
    if described.body:
        operation["requestBody"] = {"required": True, "content": content(described.body)}
    if described.needs != "nothing":
        # An empty alternative makes the key optional, since a server without keys needs none.
        alternatives: list[JsonObject] = [{}] if described.needs == "key" else []
        operation["security"] = [{described.needs: []}, *alternatives]
    return operation


_UNDERSCORES = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _content(content: Content, schemas: Mapping[Any, JsonObject]) -> JsonObject:
    schema, example = content.schema, content.example
    if not isinstance(schema, Mapping):
        if example is None:
            example = example_of(schema)
        schema = schemas[schema]
    described: JsonObject = {"schema": dict(schema)}
    if example is not None:
        described["example"] = example
    if content.encoding:
        described["encoding"] = dict(content.encoding)
    return described


def example_of(kind: type[Any]) -> Any:
    """Return the example in the configuration of an answer or a model."""
    config = getattr(kind, "__pydantic_config__", None) or kind.model_config
    (example,) = config["json_schema_extra"]["examples"]
    return example


def reason(status: str) -> str:
    """Return a status with its name: `404 Not Found`."""
    return f"{status} {HTTPStatus(int(status)).phrase}" if status.isdigit() else status
