"""Requests that schemathesis generates from the OpenAPI document, sent to a real server."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis.errors import Unsatisfiable

from ndif.stores.accounts.sql.accounts import SqlAccounts
from ndif.stores.accounts.sql.database import Database
from tests.cli.operations import TOKEN, Table, application
from tests.cli.test_start import Place, a_place
from tests.failures import retry
from tests.fuzzing import examples
from tests.serving import serving
from tests.stores.accounts.databases import TestDatabase
from tests.stores.accounts.databases import database as database
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis needs Python 3.11")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")
# Before a server runs in a thread: two threads must not parse source at once in Python 3.11.7.
pytest.importorskip("schemathesis.specs.openapi.schemas")
FailureGroup = pytest.importorskip("schemathesis.core.failures").FailureGroup
GenerationMode = schemathesis.GenerationMode
UnsupportedSchema = pytest.importorskip("schemathesis.core.errors").UnsupportedSchema
CHECKS: list[Any] = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.ignored_auth,
    checks.unsupported_method,
]
bounded = settings(
    max_examples=examples(0.06),  # of each kind for each route
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def place(
    server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    yield from a_place(server_environment, tmp_path_factory.mktemp("made-up") / "sessions")


@pytest.fixture(scope="module")
def started(place: Place) -> str:
    """The address of the server."""
    url: str = place.start()["url"]
    return url


@pytest.fixture(scope="module")
def token(place: Place, started: str) -> str:
    return (place.root / "current" / "token").read_text().strip()


def takes_anything(described: dict[str, Any]) -> bool:
    """Return True if every request of an operation is valid, because its paths take any text."""
    return "requestBody" not in described and all(
        parameter["in"] == "path" and parameter["schema"].keys() <= {"type", "title"}
        for parameter in described.get("parameters", ())
    )


def ask(operation: Any, mode: Any, token: str) -> int:
    """Send generated requests to an operation, check the answers, and return their number."""
    if mode is GenerationMode.NEGATIVE and takes_anything(operation.definition.raw):
        return 0
    needs_token = operation.path.startswith("/admin")
    headers = {"Authorization": f"Bearer {token}"} if needs_token else {}
    asked = 0

    @bounded
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal asked
        # Starlette's mount of the hub matches no path with a line break.
        assume(not any(re.search(r"\n|%0A", str(value)) for value in case.path_parameters.values()))
        asked += 1
        case.call_and_validate(headers=headers, timeout=PATIENCE_S, checks=CHECKS)

    # An operation may have no invalid requests. Schemathesis also gives up at some draws of a negated
    # schema: a limit of the generator, after which the requests before it have been checked.
    with contextlib.suppress(Unsatisfiable, UnsupportedSchema):
        try:
            send()
        except SystemError as error:
            # Two threads must not parse code at once: https://github.com/python/cpython/issues/106905
            if sys.version_info >= (3, 11, 8):
                raise
            retry(operation.label, str(error))
            send()
    return asked


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_generated_requests_are_answered_as_documented(
    started: str, token: str, mode: Any, subtests: pytest.Subtests
) -> None:
    """Send valid and invalid requests to every route except the one that stops the server."""
    described = schemathesis.openapi.from_url(f"{started}/openapi.json")
    asked = 0
    for operation in described.exclude(path="/admin/stop").get_all_operations():
        with subtests.test(operation.ok().label):
            asked += ask(operation.ok(), mode, token)
    assert asked > 50


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_generated_account_requests_are_answered_as_documented(
    database: TestDatabase, mode: Any, subtests: pytest.Subtests
) -> None:
    accounts = SqlAccounts(Database(database.url), 5)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with serving(application(Table(), accounts=accounts)) as url:
        # Some examples name this tier.
        tier = httpx.post(f"{url}/admin/tiers/create", json={"tier": "lab"}, headers=headers)
        assert tier.status_code == 200, tier.text
        described = schemathesis.openapi.from_url(f"{url}/openapi.json")
        asked = 0
        keys = described.include(path_regex="^/admin/(keys|tiers|users)")
        for operation in keys.get_all_operations():
            with subtests.test(operation.ok().label):
                asked += ask(operation.ok(), mode, TOKEN)
        assert asked > 20


def test_schemathesis_finds_wrong_description(started: str, token: str) -> None:
    described = httpx.get(f"{started}/openapi.json").json()
    ping = described["paths"]["/ping"]["get"]["responses"]
    ping["200"]["content"]["application/json"]["schema"] = {"const": "ping"}
    del described["paths"]["/admin/export"]["get"]["responses"]["200"]
    described["servers"] = [{"url": started}]
    schema = schemathesis.openapi.from_dict(described)
    schema.location = f"{started}/openapi.json"
    for path, says in (("/ping", "schema"), ("/admin/export", "status code")):
        with pytest.raises(FailureGroup) as caught:
            ask(schema[path]["GET"], GenerationMode.POSITIVE, token)
        assert any(says in str(exception).lower() for exception in caught.value.exceptions)


def test_server_still_works_after_generated_requests(
    started: str, place: Place, token: str
) -> None:
    assert httpx.get(f"{started}/ping").json() == "pong"
    assert httpx.post(f"{started}/admin/stop").status_code == 401
    assert "Traceback" not in place.ndif("logs", "-n", "100000").output
    stopped = httpx.post(f"{started}/admin/stop", headers={"Authorization": f"Bearer {token}"})
    assert stopped.json() == {"stopping": True}
