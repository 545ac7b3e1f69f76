"""`/admin/*` over real HTTP: the token, invalid bodies, and the answers of operations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ndif.config.settings import Settings
from ndif.gateway.operator import Operators
from ndif.gateway.sessions import Sessions
from tests.cli.operations import TOKEN, Table, application
from tests.serving import serving

GETS = ("status", "queue", "config", "export", "callbacks", "alerts", "events")
POSTS = (
    "deploy",
    "evict",
    "scale",
    "restart",
    "kill",
    "kill/key",
    "stop",
    "callbacks/retry",
    "alerts/test",
)


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def url(table: Table) -> Iterator[str]:
    with serving(application(table)) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        yield client


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"detail"}
    detail: str = answer.json()["detail"]
    assert "Traceback" not in detail
    assert detail.endswith((".", "?"))
    return detail


# The token


@pytest.fixture(scope="module")
def locked() -> Iterator[tuple[str, Table]]:
    """A server whose token the requests of the tests lack."""
    table = Table()
    with serving(application(table)) as address:
        yield address, table


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        b"Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [*(("GET", g) for g in GETS), *(("POST", p) for p in POSTS)]
)
def test_every_admin_route_needs_token(
    locked: tuple[str, Table], method: str, path: str, authorization: str | bytes | None
) -> None:
    url, table = locked
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = httpx.request(
        method, f"{url}/admin/{path}", headers=headers, content=b"{nonsense", trust_env=False
    )
    assert "token" in refused(answer, 401)
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert not table.stopped


def test_foreign_web_page_is_rejected_even_with_token(http: httpx.Client, table: Table) -> None:
    answer = http.post("/admin/stop", headers={"Origin": "https://elsewhere.org"})
    assert answer.status_code == 403
    assert not table.stopped


def test_authorization_scheme_is_case_insensitive(url: str) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        answer = httpx.get(
            f"{url}/admin/queue", headers={"Authorization": f"{scheme} {TOKEN}"}, trust_env=False
        )
        assert answer.status_code == 200


def test_empty_token_or_secret_is_rejected() -> None:
    with pytest.raises(ValueError, match="token"):
        Operators("", Sessions(("secret",), "", 60))
    with pytest.raises(ValueError, match="secret"):
        Sessions((), "", 60)


@pytest.mark.parametrize("path", POSTS)
def test_changing_operation_rejects_get(http: httpx.Client, path: str) -> None:
    assert refused(http.get(f"/admin/{path}"), 405) == f"GET is not possible at /admin/{path}."


# Invalid bodies


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("deploy", {}, "deployments"),
        ("deploy", {"deployments": "a/b"}, "deployments"),
        ("deploy", {"deployments": []}, "names no model"),
        ("deploy", {"deployments": [{"dtype": "auto"}]}, "repo_id"),
        ("deploy", {"deployments": ["no model at all"]}, "repo id"),
        ("deploy", {"deployments": ["a/b", "A/B"]}, "more than once"),
        ("deploy", {"deployments": [{"repo_id": "a/b", "replicas": 0}]}, "at least 1"),
        ("deploy", {"deployments": [{"repo_id": "a/b", "dedicate": True}]}, "dedicated"),
        ("deploy", {"deployments": ["a/b"], "generation": "new"}, '"0.8"'),
        ("deploy", {"deployments": ["a/b"], "wait": "yes"}, "wait"),
        ("deploy", {"deployments": ["a/b"], "force": True}, "there are: deployments, generation"),
        ("evict", {}, "model"),
        ("evict", {"model": ""}, "model"),
        ("evict", {"model": "a/b", "replica": 7}, "replica"),
        ("scale", {"model": "a/b"}, "replicas"),
        ("scale", {"model": "a/b", "replicas": -1}, "replicas"),
        ("scale", {"model": "a/b", "replicas": 1.5}, "replicas"),
        ("restart", {"replicas": 1}, "model"),
        ("kill", {"request_id": None}, "request_id"),
    ],
)
def test_invalid_body_is_rejected_with_reason(
    http: httpx.Client, table: Table, path: str, body: dict[str, Any], says: str
) -> None:
    assert says in refused(http.post(f"/admin/{path}", json=body), 400)
    assert table.deployed == {}


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"7", b"[" * 10_000])
def test_body_that_is_not_an_object_is_rejected(http: httpx.Client, content: bytes) -> None:
    assert "not valid" in refused(http.post("/admin/evict", content=content), 400)


def test_all_problems_of_deployment_are_reported_at_once(http: httpx.Client) -> None:
    body = {"deployments": [{"repo_id": "a/b", "replicas": 0}, {"repo_id": "c/d", "dtipe": "x"}]}
    detail = refused(http.post("/admin/deploy", json=body), 400)
    assert "'a/b': replicas must be at least 1" in detail
    assert "'c/d': 'dtipe' is not a setting; did you mean 'dtype'?" in detail


def test_body_over_limit_is_rejected(http: httpx.Client) -> None:
    answer = http.post("/admin/deploy", content=b" " * (5 * 1024**2))
    assert "larger than 4 MiB" in refused(answer, 413)


# Answers


def test_deploy_applies_settings_of_each_model(http: httpx.Client, table: Table) -> None:
    body = {
        "deployments": ["org/a", {"repo_id": "org/b", "replicas": 2, "padding_bytes": "1GiB"}],
        "wait": True,
    }
    answer = http.post("/admin/deploy", json=body).json()
    unchanged = {"changes": [], "is_down": False, "down_s": None}
    assert answer == {
        "models": [
            {
                "repo_id": "org/a",
                "generation": "0.8",
                "replicas": ["r1"],
                "evicted": [],
                "problem": None,
                **unchanged,
            },
            {
                "repo_id": "org/b",
                "generation": "0.8",
                "replicas": ["r4", "r5"],
                "evicted": [],
                "problem": None,
                **unchanged,
            },
        ]
    }
    assert table.waited_for == [True]
    assert table.deployed["org/b"].config.padding_bytes == 1024**3


def test_sync_evicts_unnamed_models(http: httpx.Client, table: Table) -> None:
    http.post("/admin/deploy", json={"deployments": {"org/a": None, "org/b": None}})
    answer = http.post("/admin/deploy", json={"deployments": ["org/b"], "sync": True}).json()
    assert answer["models"][0]["evicted"] == [{"model": "org/a", "replica_id": "r1"}]
    assert [*table.deployed] == ["org/b"]
    assert table.waited_for == [False, False]


def test_rejected_operation_reports_reason(http: httpx.Client) -> None:
    assert "org/c is not deployed" in refused(
        http.post("/admin/evict", json={"model": "org/c"}), 404
    )
    body = {"deployments": ["org/a"], "generation": "9.9"}
    assert "ndif runtime add 9.9" in refused(http.post("/admin/deploy", json=body), 409)


def test_every_other_operation_is_performed(http: httpx.Client, table: Table) -> None:
    def post(path: str, **body: Any) -> Any:
        answer = http.post(f"/admin/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    post("deploy", deployments=["org/a"])
    assert post("scale", model="ORG/A", replicas=2)["models"][0]["replicas"] == ["r1", "r4"]
    assert [row["replica_id"] for row in post("restart", model="org/a")["restarted"]] == [
        "r1",
        "r4",
    ]
    evicted = post("evict", model="org/a", replica="r4", cold=True)["evicted"]
    assert [row["replica_id"] for row in evicted] == ["r4"]
    assert table.deployed["org/a"].replicas == ["r1"]
    assert post("kill", request_id="request-2") == {"killed": True, "request_id": "request-2"}
    assert table.waiting == ["request-3"]
    assert "`ndif queue`" in refused(
        http.post("/admin/kill", json={"request_id": "request-2"}), 404
    )
    assert http.get("/admin/status").json() == asyncio.run(table.status())
    assert http.get("/admin/queue").json() == asyncio.run(table.queue())
    assert http.get("/admin/export").json() == {
        "version": 1,
        "deployments": [{"repo_id": "org/a", "replicas": 1}],
    }
    assert post("stop") == {"stopping": True}
    assert table.stopped


def test_config_answer_has_source_of_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_RUNNER_POOL", "5")
    monkeypatch.setenv("COORDINATOR_PROCESSOR_REPLY_FREQ_S", "3")
    monkeypatch.delenv("NDIF_RESULT_TTL_S", raising=False)
    with serving(application(Table(), Settings())) as url:
        answer = httpx.get(
            f"{url}/admin/config", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
        )
    settings_by_name = {setting["name"]: setting for setting in answer.json()["settings"]}
    assert len(settings_by_name) == len(Settings.model_fields)
    assert {**settings_by_name["NDIF_RUNNER_POOL"], "meaning": ""} == {
        "name": "NDIF_RUNNER_POOL",
        "value": 5,
        "default": 2,
        "source": "environment",
        "meaning": "",
        "unit": None,
    }
    assert settings_by_name["COORDINATOR_PROCESSOR_REPLY_FREQ_S"]["source"] == "environment"
    assert settings_by_name["NDIF_RESULT_TTL_S"]["source"] == "default"
    assert settings_by_name["NDIF_RESULT_TTL_S"]["value"] == 86_400
    assert settings_by_name["NDIF_RESULT_TTL_S"]["unit"] == "seconds"
    assert TOKEN not in json.dumps(answer.json())
