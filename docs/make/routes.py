"""The reference of HTTP routes, from the document that a server gives at `/openapi.json`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.make.text import cell, code
from starlette.applications import Starlette

from ndif.config.settings import Settings
from ndif.gateway.openapi import REFUSAL, reason
from ndif.server.embedded import Operator, Server

_NEEDS = {"key": "a user's API key, where the server has keys", "token": "the operator's token"}


def document() -> dict[str, Any]:
    """Return the document of a server that has every route."""
    with tempfile.TemporaryDirectory() as folder:
        # A server that is not started: nothing listens and nothing runs.
        server = Server(
            Settings.model_construct(session_root=Path(folder)),
            [],
            Path(folder) / "results",
            Operator("-"),
            host="127.0.0.1",
        )
        found: Any = server.app
        while not isinstance(found, Starlette):
            found = found._app
        (route,) = (each for each in found.routes if getattr(each, "path", "") == "/openapi.json")
        described: dict[str, Any] = route.endpoint.__self__.document  # type: ignore[attr-defined]
        return described


def page() -> str:
    """Return the page."""
    return "\n".join(_page(document()))


def _page(described: Mapping[str, Any]) -> Iterator[str]:
    yield "# HTTP\n"
    yield f"{described['info']['description']}\n"
    yield "A running server describes itself at `/docs` and, for programs, at `/openapi.json`.\n"
    for tag in described["tags"]:
        yield f"## {tag['name']}\n"
        if text := tag.get("description"):
            yield f"{text}\n"
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(path, method, operation)
    yield "## Schemas\n"
    for name, schema in sorted(described["components"]["schemas"].items()):
        yield f"### {name}\n"
        yield _json(schema)


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {method.upper()} {path}\n"
    yield f"{operation['summary']}.\n"
    if text := operation.get("description"):
        yield f"{text}\n"
    if needs := [_NEEDS[name] for each in operation.get("security", []) for name in each]:
        yield f"Needs {needs[0]}.\n"
    if parameters := operation.get("parameters"):
        yield "| parameter | in | | example |\n| --- | --- | --- | --- |"
        for each in parameters:
            text = f"{each['description']}{' Required.' if each['required'] else ''}"
            example = code(str(each["example"]))
            yield f"| {code(each['name'])} | {each['in']} | {cell(text)} | {example} |"
        yield ""
    if body := operation.get("requestBody"):
        yield from _contents("Body", body["content"])
    yield "| answer | |\n| --- | --- |"
    for status, response in operation["responses"].items():
        if status not in ("4XX", "5XX"):  # those of every route
            yield f"| {reason(status)} | {cell(response['description'])} |"
    yield ""
    for status, response in operation["responses"].items():
        own = {
            media_type: content
            for media_type, content in response["content"].items()
            if content["schema"].get("$ref") != REFUSAL
        }
        yield from _contents(reason(status), own)


def _contents(title: str, by_type: Mapping[str, Any]) -> Iterator[str]:
    for media_type, content in by_type.items():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        link = f", [{name}](#{name.lower()})" if name else ""
        yield f"{title}: `{media_type}`{link}\n"
        if "example" in content:
            yield _json(content["example"])
        elif not name and content["schema"]:
            yield _json(content["schema"])


def _json(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=2, ensure_ascii=False)}\n```\n"
