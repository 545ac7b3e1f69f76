"""The admin routes on a separate port, and the commands that use it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.test_start import Place, a_place, free_port
from tests.services.packages import need

pytestmark = pytest.mark.process


@pytest.fixture
def place(server_environment: dict[str, str], tmp_path: Path) -> Iterator[Place]:
    yield from a_place(server_environment, tmp_path / "sessions")


def get(url: str, token: str = "", **headers: str) -> httpx.Response:
    given = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.get(url, headers={**given, **headers}, trust_env=False)


@pytest.mark.parametrize("gateways", [0, 2], ids=["one process", "two gateways"])
def test_admin_routes_are_served_only_on_admin_port(place: Place, gateways: int) -> None:
    variables = {"NDIF_ADMIN_PORT": free_port()}
    if gateways:
        need("redis-server", "redis-server")
        variables["NDIF_BROKER_URL"] = f"redis://:secret@127.0.0.1:{free_port()}/0"
        variables["NDIF_API_WORKERS"] = str(gateways)
    url = place.start(**variables)["url"]
    token = (place.root / "current" / "token").read_text().strip()
    admin = f"http://127.0.0.1:{variables['NDIF_ADMIN_PORT']}"

    # Repeated so that requests reach each gateway.
    for _ in range(8):
        hidden = get(f"{url}/admin/status", token)
        assert hidden.status_code == 404
        assert "nothing at /admin/status" in hidden.json()["detail"]
        assert get(f"{admin}/admin/status", token).json().keys() >= {"models", "nodes"}
    # Only the admin port has a login, and every gateway accepts every session.
    with httpx.Client(base_url=admin, trust_env=False) as browser:
        entered = browser.post("/login", json={"password": token})
        assert entered.status_code == 200, entered.text
        page = {"Sec-Fetch-Site": "same-origin", "X-CSRF-Token": entered.json()["csrf"]}
        for _ in range(8):
            assert browser.get("/admin/status").status_code == 200
            assert browser.post("/admin/gc", json={"dry_run": True}, headers=page).is_success
            assert browser.get(f"{url}/admin/status").status_code == 404
    for path in ("/login", "/logout", "/session"):
        assert httpx.post(f"{url}{path}", trust_env=False).status_code == 404
    assert 'data-operators="here"' in get(f"{admin}/").text
    assert 'data-operators="elsewhere"' in get(f"{url}/").text
    events = get(f"{admin}/admin/events", token).json()["events"]
    assert [event["kind"] for event in events] == ["login", "started"]

    # No header selects the port.
    named = get(f"{url}/admin/config", token, Host=admin.removeprefix("http://"))
    assert named.status_code == 404
    assert get(f"{admin}/admin/config").status_code == 401
    assert get(f"{admin}/ping").json() == get(f"{url}/ping").json() == "pong"
    assert httpx.post(f"{admin}/request", trust_env=False).status_code == 404
    assert get(f"{admin}/admin/config", Host="evil.example").status_code == 403

    # Local commands find the admin port; remote commands need its address.
    assert place.read("status")["models"] == []
    assert place.read("env")["python_version"]
    info = place.read("info")
    assert (info["admin_host"], info["admin_port"]) == ("127.0.0.1", int(admin.rpartition(":")[2]))
    assert admin in place.ndif("info").output
    elsewhere = {"NDIF_SESSION_ROOT": str(place.root / "nowhere")}
    for address, code in ((admin, 0), (url, 4)):
        result = place.ndif("queue", "--url", address, "--token", token, **elsewhere)
        assert result.code == code, result
    doctor = place.ndif("doctor", **variables).output
    assert f"port {variables['NDIF_ADMIN_PORT']}" in doctor
    assert place.ndif("stop").code == 0


def test_unavailable_admin_port_is_reported(place: Place) -> None:
    same = place.environment["NDIF_API_PORT"]
    result = place.ndif("start", NDIF_ADMIN_PORT=same)
    assert result.code == 1
    assert f"NDIF_ADMIN_PORT must be another port than the server's, {same}." in result.error
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = place.ndif("start", NDIF_ADMIN_PORT=port)
    assert result.code == 1
    assert f"Port {port} is in use. Choose another with NDIF_ADMIN_PORT." in result.error
    assert place.processes() == []
