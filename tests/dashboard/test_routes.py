"""The dashboard's routes: access, static files, and the start and end of streams."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ndif.config.settings import Settings
from ndif.dashboard import events
from ndif.dashboard.access import mode_of
from ndif.dashboard.pages import DashboardFiles
from ndif.server.embedded import Operator
from tests.dashboard.sample import KEY, RUNNING, USER, Laboratory, served
from tests.security.serving import gateway

STATIC = Path(__file__).parents[2] / "src" / "ndif" / "dashboard" / "static"
MOST_BYTES = 300_000
AS_ADA = {"ndif-api-key": KEY}


@pytest.fixture(scope="module")
def laboratory() -> Laboratory:
    return Laboratory()


@pytest.fixture(scope="module")
def url(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(laboratory, tmp_path_factory.mktemp("public")) as base_url:
        yield base_url


@pytest.fixture(scope="module")
def shut(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(laboratory, tmp_path_factory.mktemp("login"), "login") as base_url:
        yield base_url


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers, verify=False)


def first_events(url: str, most: int, **headers: str) -> dict[str, Any]:
    """Return the first events of a stream by name."""
    parts: dict[str, Any] = {}
    with httpx.stream("GET", f"{url}/dashboard/events", headers=headers, verify=False) as answer:
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                parts[name] = json.loads(line[6:])
            if len(parts) == most:
                break
    return parts


@pytest.mark.parametrize(
    ("host", "settings", "many_users", "mode"),
    [
        ("127.0.0.1", {}, True, "public"),
        ("::1", {}, True, "public"),
        ("0.0.0.0", {}, True, "login"),
        ("127.0.0.1", {"public_url": "https://ndif.example.org"}, True, "login"),
        ("127.0.0.1", {"allowed_hosts": "ndif.example.org"}, True, "login"),
        ("0.0.0.0", {}, False, "public"),
        ("0.0.0.0", {"dashboard": "public"}, True, "public"),
        ("127.0.0.1", {"dashboard": "login"}, True, "login"),
        ("127.0.0.1", {"dashboard": "off"}, False, "off"),
    ],
)
def test_default_access_mode_follows_host_and_settings(
    host: str, settings: dict[str, Any], many_users: bool, mode: str
) -> None:
    assert mode_of(Settings(**settings), host, many_users=many_users) == mode


def test_public_state_is_readable_without_key_but_not_with_wrong_key(
    laboratory: Laboratory, url: str
) -> None:
    state = get(f"{url}/dashboard/state").json()
    assert state.pop("server")["access"] == "public"
    assert state == laboratory.state
    assert get(f"{url}/dashboard/state", **AS_ADA).status_code == 200
    for path in ("/dashboard/state", "/dashboard/events"):
        assert get(url + path, **{"ndif-api-key": "nobody's"}).status_code == 401


def test_login_mode_requires_key(shut: str) -> None:
    for path in ("/dashboard/state", "/dashboard/events"):
        answer = get(shut + path)
        assert answer.status_code == 401
        assert "send an API key" in answer.json()["detail"]
    assert get(f"{shut}/dashboard/state", **AS_ADA).status_code == 200
    assert "Llama" not in get(f"{shut}/").text


def test_disabled_dashboard_answers_404(laboratory: Laboratory, tmp_path: Path) -> None:
    with served(laboratory, tmp_path, "off") as url:
        for path in ("/", "/dashboard/state", "/dashboard/events", "/static/x/style.css"):
            assert get(url + path).status_code == 404


def test_stream_contains_state_and_own_jobs(laboratory: Laboratory, url: str) -> None:
    public = first_events(url, 6)
    assert public.pop("me") == {"known": False}
    assert public.keys() <= laboratory.state.keys()
    assert RUNNING not in json.dumps(public)
    mine = first_events(url, 7, **AS_ADA)
    assert mine["me"]["email"] == USER
    assert mine["me"]["limits"]["unfinished_jobs"] == 1000
    assert RUNNING in json.dumps(mine["jobs"])


def test_stream_ends_when_key_is_removed(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_BEAT_S", 0.1)
    with (
        served(laboratory, tmp_path, "login") as url,
        httpx.stream("GET", f"{url}/dashboard/events", headers=AS_ADA, verify=False) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "event: me"
        other = tmp_path / "other.yaml"
        other.write_text("keys:\n- {key: another-key, user: bob}\n")
        other.chmod(0o600)
        other.replace(tmp_path / "keys.yaml")
        # The stream sends heartbeats until it ends.
        assert [*lines][-1] == ""


def test_static_files_are_immutable_and_page_is_revalidated(url: str) -> None:
    page = get(f"{url}/", **{"Accept-Encoding": "identity"})
    assert page.headers["Cache-Control"] == "no-cache"
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    again = get(f"{url}/", **{"If-None-Match": page.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    places = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
    assert len(places) > 15
    sent = len(page.content)
    for place in places:
        plain = get(url + place, **{"Accept-Encoding": "identity"})
        assert plain.status_code == 200, place
        assert plain.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert plain.headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in plain.headers["Content-Security-Policy"]
        assert "Accept-Encoding" in plain.headers["Vary"]
        packed = get(url + place, **{"Accept-Encoding": "gzip"})
        assert packed.headers["Content-Encoding"] == "gzip"
        assert packed.content == plain.content
        assert int(packed.headers["Content-Length"]) == len(gzip.compress(plain.content, mtime=0))
        sent += len(plain.content)
    assert sent <= MOST_BYTES
    for missing in (
        places[0].replace(DashboardFiles().version, "0" * 16),
        f"/static/{DashboardFiles().version}/index.html",
        f"/static/{DashboardFiles().version}/%2e%2e/pages.py",
        f"/static/{DashboardFiles().version}/vendor/preact.LICENSE",
    ):
        assert get(url + missing).status_code == 404


def test_page_preloads_every_module() -> None:
    """A module that the browser finds only through an import costs a round trip."""
    page = (STATIC / "index.html").read_text()
    modules = {file.name for file in STATIC.glob("*.js")} | {"vendor/preact.js"}
    modules -= {"admin.js", "login.js"}  # loaded only when an operator opens the admin view
    assert {name for name in modules if f"{{{{files}}}}/{name}" not in page} == set()


@pytest.mark.process
def test_page_of_real_server_contains_no_token(runtimes: Path, tmp_path: Path) -> None:
    with gateway(tmp_path, runtimes, whose=Operator("opens-it")) as server:
        server.submit()
        answer = get(f"{server.url}/")
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "opens-it" not in answer.text
