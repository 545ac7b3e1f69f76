"""The OpenAPI document: complete, valid, and consistent with the real answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from ndif.config.settings import Settings
from ndif.control.account_operations import ACCOUNT_OPERATIONS
from ndif.control.operations import OPERATIONS
from ndif.gateway.openapi import EventsRoute
from ndif.schema.deployment import DeploymentConfig
from ndif.server.embedded import Operator, Server
from ndif.stores.accounts.sql.accounts import SqlAccounts
from ndif.stores.accounts.sql.database import Database
from tests.cli.operations import TOKEN, Table, application
from tests.cli.test_start import Place, a_place
from tests.clients.harness import Client, LocalServer
from tests.conftest import NAME, client_environment
from tests.security.serving import OLD, PAYLOAD
from tests.serving import serving
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Starlette:
    """The application of a whole server, without middleware."""
    folder = tmp_path_factory.mktemp("results")
    server = Server(
        Settings(),
        [DeploymentConfig("org/name", "org/name")],
        folder,
        Operator(TOKEN),
        host="127.0.0.1",
    )
    inner: Any = server.app
    while not isinstance(inner, Starlette):
        inner = inner._app
    return inner


@pytest.fixture(scope="module")
def described(app: Starlette) -> dict[str, Any]:
    (route,) = (
        candidate for candidate in app.routes if getattr(candidate, "path", "") == "/openapi.json"
    )
    assert isinstance(route, Route)
    document: dict[str, Any] = route.endpoint.__self__.document
    # As sent over the wire.
    again: dict[str, Any] = json.loads(json.dumps(document))
    return again


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert method in METHODS
            yield path, method, operation


def validator(described: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Return a validator of a schema within the document."""
    return jsonschema.Draft202012Validator({**schema, "components": described["components"]})


def routes_of(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield method and path of every route and live channel."""
    for route in routes:
        if isinstance(route, Mount):
            path = route.path_format.removesuffix("/{path}")
            below = list(routes_of(route.routes, prefix + path))
            yield from below or [("LIVE", f"{prefix}{path}")]
        elif isinstance(route, WebSocketRoute | EventsRoute):
            yield "LIVE", prefix + route.path
        else:
            assert isinstance(route, Route)
            for method in route.methods - {"HEAD"}:
                yield method, prefix + route.path_format


# The document


def test_document_describes_exactly_the_routes(app: Starlette, described: dict[str, Any]) -> None:
    routes = set(routes_of(app.routes))
    of_operations = {(method.upper(), path) for path, method, _ in operations(described)}
    channels = [tag["name"] for tag in described["tags"] if "description" in tag]
    of_channels = {("LIVE", name.split()[0].removesuffix("/socket.io")) for name in channels}
    assert routes == of_operations | of_channels
    assert {("POST", "/request"), ("LIVE", "/subscribe"), ("LIVE", "/ws")} < routes
    assert {("GET", "/response/{id}"), ("GET", "/results/{id}"), ("GET", "/docs")} < routes
    for kinds in (OPERATIONS, ACCOUNT_OPERATIONS):
        assert {(kind.method, f"/admin/{kind.name}") for kind in kinds} < routes
    assert {
        ("GET", "/requests"),
        ("GET", "/requests/{id}"),
        ("GET", "/usage"),
        ("DELETE", "/request/{id}"),
    } < routes
    assert len(routes) > 25


def test_document_is_valid_openapi(described: dict[str, Any]) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis needs Python 3.11")
    schema = schemathesis.openapi.from_dict(described)
    schema.validate()
    ids = [operation["operationId"] for _, _, operation in operations(described)]
    assert len(ids) == len(set(ids))
    tags = {tag["name"] for tag in described["tags"]}
    for path, _, operation in operations(described):
        assert set(operation["tags"]) <= tags
        assert operation["summary"]
        # The path parameters match the path exactly.
        named = {
            parameter["name"]
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "path"
        }
        assert named == set(re.findall(r"{(\w+)}", path))


def test_examples_match_their_schemas(described: dict[str, Any]) -> None:
    checked = 0
    for path, method, operation in operations(described):
        contents = [
            *operation.get("requestBody", {}).get("content", {}).values(),
            *(
                content
                for response in operation["responses"].values()
                for content in response["content"].values()
            ),
            *operation.get("parameters", ()),
        ]
        for content in contents:
            if "example" in content:
                validator(described, content["schema"]).validate(content["example"])
                checked += 1
        body = operation.get("requestBody", {}).get("content", {})
        assert all("example" in media for kind, media in body.items() if "octet" not in kind), path
        for status, response in operation["responses"].items():
            for kind, content in response["content"].items():
                is_json = kind == "application/json"
                assert not is_json or "example" in content or path == "/openapi.json", (
                    method,
                    path,
                    status,
                )
    assert checked > 100


def test_server_accepts_examples_of_operations(described: dict[str, Any]) -> None:
    table = Table()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        serving(application(table)) as url,
        httpx.Client(base_url=url, headers=headers, trust_env=False) as http,
    ):
        for kind in OPERATIONS:
            if kind.model_fields:
                operation = described["paths"][f"/admin/{kind.name}"]["post"]
                example = operation["requestBody"]["content"]["application/json"]["example"]
                answer = http.post(f"/admin/{kind.name}", json=example)
                # 404 of a job that is not there.
                assert answer.status_code == (404 if kind.name == "kill" else 200), answer.text


# Real answers


def holds(described: dict[str, Any], path: str, answer: httpx.Response) -> Any:
    """Check an answer against its description, and return its content."""
    method = answer.request.method.lower()
    responses = described["paths"][path][method]["responses"]
    status = str(answer.status_code)
    response = responses.get(status) or responses[f"{status[0]}XX"]
    assert set(map(str.lower, response["headers"])) - {"etag"} <= set(answer.headers)
    kind = answer.headers["Content-Type"].partition(";")[0]
    content = response["content"][kind]
    if kind != "application/json":
        return answer.content
    document = answer.json()
    validator(described, content["schema"]).validate(document)
    return document


def shape(value: Any) -> Any:
    """Return a JSON value with the types of its values in place of the values."""
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value[:1]]
    return type(value).__name__


def example(described: dict[str, Any], path: str, method: str = "get", status: str = "200") -> Any:
    responses = described["paths"][path][method]["responses"]
    return responses[status]["content"]["application/json"]["example"]


@pytest.fixture(scope="module")
def polled(server: LocalServer, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The payload of a trace, recorded by a client."""
    recorded = tmp_path_factory.mktemp("recorded")
    home = tmp_path_factory.mktemp("client-openapi")
    environment = {**client_environment(server, home, None), "RECORDED": str(recorded)}
    client = Client("scenarios_limits", NAME, tiny_gpt2, environment)
    try:
        client.run("scenario_payloads_are_recorded")
    finally:
        client.close()
    return (recorded / "ends").read_bytes()


def test_answers_of_server_match_document(
    server: LocalServer, described: dict[str, Any], polled: bytes
) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for path in ("/ping", "/connected", "/whoami"):
            document = holds(described, path, http.get(path))
            if path != "/whoami":
                assert document == example(described, path)
        assert shape(holds(described, "/env", http.get("/env"))).keys() == {
            "python_version",
            "packages",
        }
        status = holds(described, "/status", http.get("/status"))
        (real,) = status["deployments"].values()
        (given,) = example(described, "/status")["deployments"].values()
        assert real.keys() == given.keys()
        model = holds(described, "/models/{repo_id}", http.get(f"/models/{NAME}"))
        assert model.keys() == example(described, "/models/{repo_id}").keys()
        assert model["tree"].keys() == example(described, "/models/{repo_id}")["tree"].keys()
        key = json.dumps({"repo_id": NAME, "revision": None, "task": "text-generation"})
        model_key = f"nnsight.modeling.transformers.TransformersModel:{key}"
        submitted = http.post(
            "/request",
            data={"data": json.dumps({"model_key": model_key, "compress": True})},
            files={"blob": polled},
            headers={"nnsight-version": "0.8.1"},
        )
        received = holds(described, "/request", submitted)
        assert shape(received) == shape(example(described, "/request", "post"))
        response = f"/response/{received['id']}"

        def ended() -> dict[str, Any] | None:
            job = holds(described, "/response/{id}", http.get(response))
            return job if job["status"] in ("COMPLETED", "ERROR") else None

        job = until(ended)
        assert job["status"] == "COMPLETED", job
        assert shape(job) == shape(example(described, "/response/{id}"))
        for headers, code in (({}, 200), ({"Range": "bytes=0-9"}, 206)):
            result = http.get(job["data"], headers=headers)
            assert result.status_code == code
            holds(described, "/results/{id}", result)
            name = f'attachment; filename="{received["id"]}.pt.zst"'
            assert result.headers["Content-Disposition"] == name
        jobs = holds(described, "/requests", http.get("/requests?limit=1"))["requests"]
        assert [job["id"] for job in jobs] == [received["id"]]
        assert jobs[0].keys() == example(described, "/requests")["requests"][1].keys()
        trace = holds(
            described, "/requests/{id}", http.get(f"/requests/{received['id']}", headers={})
        )
        assert trace.keys() == example(described, "/requests/{id}").keys()
        assert (trace["error"], trace["stored"]) == (None, True)
        names = [step["name"] for step in trace["steps"]]
        # The no-op reports no steps of its runner.
        assert names[:3] == ["receive", "received", "queued"]
        assert {"acquire", "payload", "send", "running", "store", "deliver"} < {*names}
        for query in ("", "?by=day&since=2026-01-01"):
            usage = holds(described, "/usage", http.get(f"/usage{query}"))
            assert shape(usage["usage"]) == shape(example(described, "/usage")["usage"])
        secret = holds(described, "/callbacks/secret", http.get("/callbacks/secret"))
        assert len(secret["secret"]) == len(example(described, "/callbacks/secret")["secret"])
        ended = http.delete(f"/request/{received['id']}")
        assert ended.status_code == 404
        holds(described, "/request/{id}", ended)
        for number in ("0", "1001", "-1", "1.5", "many", "²", "", "9" * 5000):
            answer = http.get("/requests", params={"limit": number})
            assert answer.status_code == 400, answer.text
            assert holds(described, "/requests", answer)["detail"].startswith("limit: ")
        for query in ("by=colour", "since=2026-13-01", "since=yesterday", "since="):
            answer = http.get(f"/usage?{query}")
            assert answer.status_code == 400, answer.text
            holds(described, "/usage", answer)
        refusals = {
            "/results/{id}": http.get(f"/results/{received['id']}"),
            "/requests/{id}": http.get("/requests/0d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21"),
            "/request": http.post("/request"),
            "/env": http.get("/env?generation=0.1"),
            "/models/{repo_id}": http.get("/models/no/model"),
        }
        for path, answer in refusals.items():
            assert answer.is_client_error
            holds(described, path, answer)


def test_answers_to_older_client_match_document(
    server: LocalServer, described: dict[str, Any]
) -> None:
    key = json.dumps({"repo_id": NAME, "revision": None})
    headers = {
        "nnsight-version": "0.7.0",
        "nnsight-model-key": f"{OLD.partition(':')[0]}:{key}",
        "nnsight-compress": "True",
    }
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        submitted = http.post("/request", content=PAYLOAD, headers=headers)
        received = holds(described, "/request", submitted)
        assert received["status"] == "RECEIVED"
        holds(described, "/response/{id}", http.get(f"/response/{received['id']}"))


def test_answers_of_hub_mirror_match_document(
    server: LocalServer, described: dict[str, Any]
) -> None:
    api, repository = "/hub/api/models/{organization}/{name}", "/hub/{organization}/{name}"
    base = f"/hub/api/models/{NAME}"
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        info = holds(described, api, http.get(base))
        given = example(described, api)
        assert shape(info) == shape(given)
        holds(described, f"{api}/revision/{{revision}}", http.get(f"{base}/revision/main"))
        tree = f"{api}/tree/{{location}}"
        listed = holds(described, tree, http.get(f"{base}/tree/main?recursive=true"))
        assert shape(listed) == shape(example(described, tree))
        file = f"{repository}/resolve/{{location}}"
        holds(described, file, http.get(f"/hub/{NAME}/resolve/main/config.json"))
        missing = http.get(f"/hub/{NAME}/resolve/main/none")
        assert shape(holds(described, file, missing)) == {"error": "str"}
        part = http.get(f"/hub/{NAME}/resolve/main/config.json", headers={"Range": "bytes=0-1,4-5"})
        assert part.status_code == 206
        holds(described, file, part)


@pytest.fixture
def place(server_environment: dict[str, str], tmp_path: Path) -> Iterator[Place]:
    yield from a_place(server_environment, tmp_path / "sessions")


def test_answers_of_admin_routes_match_document(place: Place, described: dict[str, Any]) -> None:
    url = place.start()["url"]
    token = (place.root / "current" / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=PATIENCE_S) as http:

        def does(name: str, body: Any = None, status: int = 200) -> Any:
            path = f"/admin/{name}"
            answer = http.get(path) if body is None else http.post(path, json=body)
            assert answer.status_code == status, answer.text
            return holds(described, path, answer)

        body = {"deployments": [{"repo_id": NAME, "dedicated": True}], "wait": True}
        deployed = does("deploy", body)
        assert shape(deployed) == shape(example(described, "/admin/deploy", "post"))
        assert deployed["models"][0]["problem"] is None
        state, given = does("status"), example(described, "/admin/status")
        assert shape(state["nodes"][0]).keys() == shape(given["nodes"][0]).keys()
        assert state["models"][0].keys() == given["models"][0].keys()
        assert state["models"][0]["replicas"][0].keys() == given["models"][0]["replicas"][0].keys()
        assert shape(does("queue")["models"]).__class__ is list
        assert shape(does("export")) == shape(example(described, "/admin/export"))
        assert does("config")["settings"]
        does("jobs", {})
        does("usage", {"by": "day", "since": "2026-01-01"})
        does("usage", {"user": "a\0b"}, 400)
        collected = does("gc", {"dry_run": True})
        assert shape(collected) == shape(example(described, "/admin/gc", "post"))
        does("alerts", status=409)  # alerts have no recipients
        does("alerts/test", {}, 409)
        assert does("callbacks")["callbacks"] == []
        assert does("callbacks/retry", {"all": True}) == {"retried": []}
        does("callbacks/retry", {"request_id": "nobody"}, 404)
        does("callbacks/retry", {"request_id": "\0"}, 400)
        does("scale", {"model": NAME, "replicas": 1})
        restarted = does("restart", {"model": NAME})
        assert shape(restarted) == shape(example(described, "/admin/restart", "post"))
        does("kill", {"request_id": "nobody"}, 404)
        assert does("kill/key", {"account": "nobody"}) == {"killed": 0}
        does("evict", {"model": NAME, "cold": True})
        does("evict", {"all": True})
        does("deploy", {"deployments": []}, 400)
        # The wrong token.
        http.headers["Authorization"] = "Bearer wrong"
        does("status", None, 401)
        http.headers["Authorization"] = f"Bearer {token}"
        does("stop", {})


def test_answers_of_account_routes_match_document(
    described: dict[str, Any], tmp_path: Path
) -> None:
    accounts = SqlAccounts(Database(f"sqlite:///{tmp_path / 'accounts.sqlite'}"), 5)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    table = Table()
    table.jobs_of_keys = 2
    with (
        serving(application(table, accounts=accounts)) as url,
        httpx.Client(base_url=url, headers=headers, trust_env=False) as http,
    ):

        def does(name: str, status: int = 200, **changed: Any) -> Any:
            """Send the example with some fields changed; check the answer, and return it."""
            path = f"/admin/{name}"
            ((method, operation),) = described["paths"][path].items()
            if method == "get":
                query = {
                    parameter["name"]: parameter["example"]
                    for parameter in operation.get("parameters", ())
                }
                answer = http.get(path, params={**query, **changed})
            else:
                body = operation.get("requestBody", {"content": {"application/json": {}}})
                content = body["content"]["application/json"].get("example", {})
                answer = http.post(path, json={**content, **changed})
            assert answer.status_code == status, answer.text
            document = holds(described, path, answer)
            assert (
                status != 200
                or shape(document).keys() == shape(example(described, path, method)).keys()
            )
            return document

        does("tiers/create")
        does("tiers/create", 409)
        created = does("keys/create")
        key = {"key": created["id"]}
        assert shape(does("tiers")) == shape(example(described, "/admin/tiers"))
        assert does("tiers/change")["limits"] == {"requests_per_minute": 120}
        assert does("keys/show", **key) == {k: v for k, v in created.items() if k != "api_key"}
        assert len(does("keys")["keys"]) == 1
        assert does("tiers/withdraw", **key)["tiers"] == []
        assert does("tiers/assign", **key)["tiers"] == ["lab"]
        does("tiers/delete", 409)
        does("tiers/withdraw", **key)
        assert does("tiers/delete") == example(described, "/admin/tiers/delete", "post")
        assert does("keys/import") == {"imported": 1, "known": 0}
        assert does("users")["users"][0]["keys"] == 2
        assert len(does("users/show")["keys"]) == 2
        revoked = does("keys/revoke", **key)
        assert (revoked["state"], revoked["killed"]) == ("REVOKED", 2)
        assert table.killed_keys == [created["account"]]
        # Without a leader, the key is revoked and the answer says that its jobs continue.
        table.leads = False
        assert "its jobs go on" in does("keys/revoke", 503, **key)["detail"]
        table.leads = True
        does("keys/migrate", 409)
        for name in ("keys/show", "keys/revoke", "tiers/delete", "tiers/assign", "users/show"):
            field = "tier" if name == "tiers/delete" else name.partition("/")[0].removesuffix("s")
            does(name, 404, **{field: "nobody"})
        # Numbers outside the valid ranges.
        for limit in (10**400, -1, 0, 1.5, "many", True):
            does("tiers/create", 400, limits={"requests_per_minute": limit})
        for seconds in (0, -1, 1e300, 10**400):
            does("keys/create", 400, expires_in_s=seconds)
        for text in ("a\0", "a\n", "", "x" * 400):
            does("keys/create", 400, user=text)
            does("users/show", 400, user=text)


# The page


class Tags(HTMLParser):
    """The tags of a page, and the texts of its headings."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_docs_page_has_every_route_and_loads_nothing(
    server: LocalServer, described: dict[str, Any]
) -> None:
    answer = httpx.get(f"{server.url}/docs")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = Tags()
    page.feed(answer.text)
    assert not {"script", "img", "link", "iframe", "form"} & {tag for tag, _ in page.tags}
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    for tag, attributes in page.tags:
        assert not {"src", "style", "onclick"} & attributes.keys(), tag
        if tag == "a":
            target = attributes["href"] or ""
            assert target == "/openapi.json" or target.removeprefix("#") in ids
    for path, method, operation in operations(described):
        # `ndif local start` lacks these routes.
        if not path.startswith(("/admin", "/login", "/logout", "/session")):
            assert operation["operationId"] in ids, (method, path)
    assert "/subscribe (live updates of nnsight 0.8)" in page.text
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert "/admin/status" not in document["paths"]
    assert document["info"]["version"]
