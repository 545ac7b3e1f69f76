"""`GET /openapi.json` and `GET /docs`: the OpenAPI document, as JSON and as an HTML page.

The page is rendered here: it has no script, and loads no further resource.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from ndif import __version__
from ndif.gateway.openapi import (
    JSON,
    REFUSAL,
    Answer,
    ApiRoute,
    Description,
    Refusal,
    document,
    example_of,
    json_response,
    reason,
)
from ndif.schema.answer import JsonObject

_CACHED = {"Cache-Control": "no-cache"}
_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 20%, Canvas); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0; padding: .3rem .8rem; }
summary { cursor: pointer; }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { overflow-x: auto; border-left: 3px solid var(--line); padding-left: .8rem; }
table { border-collapse: collapse; }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
.method { display: inline-block; min-width: 4rem; font-weight: bold; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_DESCRIPTIONS = (
    Description(
        "the server",
        "This description, for programs",
        answers={200: Answer({"type": "object"}, "An OpenAPI 3.1 document.")},
    ),
    Description(
        "the server",
        "This description, for people",
        answers={
            200: Answer({"type": "string"}, "A page without scripts.", media_types=("text/html",))
        },
    ),
)


class Documents:
    """The description of some routes and of its own two, as JSON and as a page."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        for_programs, for_people = _DESCRIPTIONS
        self._own: list[BaseRoute] = [
            ApiRoute("/openapi.json", self.openapi, for_programs),
            ApiRoute("/docs", self.docs, for_people),
        ]
        self._described = [*routes, *self._own]

    def routes(self) -> list[BaseRoute]:
        """Return the two routes."""
        return self._own

    @cached_property
    def document(self) -> JsonObject:
        """The OpenAPI document."""
        return document(self._described, __version__)

    @cached_property
    def _page(self) -> str:
        return "".join(_page(self.document))

    async def openapi(self, _: Request) -> Response:
        """Answer with the document."""
        return json_response(self.document, headers=_CACHED)

    async def docs(self, _: Request) -> Response:
        """Answer with the page."""
        return HTMLResponse(self._page, headers={**_CACHED, "Content-Security-Policy": _POLICY})


_REFUSED = {JSON: {"schema": {"$ref": REFUSAL}, "example": example_of(Refusal)}}


def _page(described: Mapping[str, Any]) -> Iterator[str]:
    """Yield the HTML of an OpenAPI document, piece by piece."""
    info = described["info"]
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(info['title'])}: its routes</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
    yield _prose(info["description"])
    yield '<p>For programs: <a href="/openapi.json">openapi.json</a>.</p>'
    for tag in described["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2>"
        yield _prose(tag.get("description", ""))
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(path, method, operation)
    yield "<h2>schemas</h2>"
    for name, schema in sorted(described["components"]["schemas"].items()):
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        yield f"{_code(schema)}</details>"
    yield "</body></html>"


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f'<details id="{escape(operation["operationId"])}"><summary>'
    yield f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code> '
    yield f"{_line(operation['summary'])}</summary>"
    yield _prose(operation.get("description", ""))
    if security := operation.get("security"):
        schemes = (
            next(iter(alternative), "nothing if the server has no keys") for alternative in security
        )
        yield f"<p>Needs: {escape(', or '.join(schemes))}.</p>"
    if parameters := operation.get("parameters"):
        yield "<h3>parameters</h3><table>"
        for parameter in parameters:
            yield f"<tr><td><code>{escape(parameter['name'])}</code></td><td>{parameter['in']}</td>"
            yield f"<td>{_line(parameter['description'])} <code>{escape(str(parameter['example']))}</code>"
            yield "</td></tr>"
        yield "</table>"
    if body := operation.get("requestBody"):
        yield "<h3>body</h3>"
        yield from _contents(body["content"])
    for status, response in operation["responses"].items():
        yield f"<h3>{escape(reason(status))}</h3><p>{_line(response['description'])}</p>"
        if response["content"] != _REFUSED:  # the page's introduction describes refusals
            yield from _contents(response["content"])
    yield "</details>"


def _contents(by_type: Mapping[str, Any]) -> Iterator[str]:
    for media_type, content in by_type.items():
        schema = content["schema"]
        name = schema.get("$ref", "").rpartition("/")[2]
        link = f' <a href="#{escape(name)}">{escape(name)}</a>' if name else ""
        yield f"<p><code>{escape(media_type)}</code>{link}</p>"
        if "example" in content:
            yield _code(content["example"])
        elif not name:
            yield _code(schema)


def _code(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _prose(text: str) -> str:
    return "".join(f"<p>{_line(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph)


def _line(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))
