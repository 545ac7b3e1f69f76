"""The operator's views in a real browser: login, lock-out, models, keys, and attacks from other origins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from argon2 import PasswordHasher
from playwright.sync_api import Browser, Page, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ndif.gateway import login
from ndif.server.embedded import Operator
from tests.cli.test_start import Place, a_place
from tests.conftest import NAME
from tests.dashboard.browser import ELSEWHERE, PHONE, check_access, chromium, visiting
from tests.security.serving import Gateway, gateway
from tests.services.packages import need
from tests.serving import serving
from tests.waiting import until

pytestmark = pytest.mark.process

TOKEN = "opens-it"
PASSWORD = "three words nobody knows"
HASH = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(PASSWORD)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(need("chromium", "chromium")) as started:
        yield started


def enter(page: Page, password: str) -> None:
    page.get_by_label("Password, or the server's token").fill(password)
    page.get_by_role("button", name="Log in").click()


def is_in(page: Page) -> None:
    expect(page.get_by_role("button", name="Log out")).to_be_visible()


# The login


@pytest.fixture
def server(runtimes: Path, tmp_path: Path) -> Iterator[Gateway]:
    whose = Operator(TOKEN)
    with gateway(tmp_path, runtimes, whose=whose, admin_password_hash=HASH) as served_gateway:
        yield served_gateway


def test_operator_logs_in_and_out(browser: Browser, server: Gateway) -> None:
    # The browser logs the 401 for a wrong password and the 409 for a missing key database.
    with visiting(browser, server.url, clean=False) as page:
        page.get_by_role("link", name="Operate").click()
        enter(page, "guessed")
        expect(page.get_by_role("alert").filter(has_text="not the operator's")).to_be_visible()
        enter(page, PASSWORD)
        is_in(page)
        assert page.evaluate("document.cookie") == ""
        # The login survives a reload.
        page.reload()
        is_in(page)
        for view in ("Usage", "Events", "Alerts", "Webhooks and mail", "Calendar"):
            page.get_by_role("link", name=view).click()
            expect(page.get_by_role("heading", name=view)).to_be_visible()
        page.get_by_role("link", name="Keys and tiers").click()
        expect(page.get_by_text("no database of API keys")).to_be_visible()
        page.get_by_role("link", name="Events").click()
        expect(page.get_by_role("cell", name="login", exact=True).first).to_be_visible()
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("button", name="Log in")).to_be_visible()
        assert page.request.get(f"{server.url}/admin/status").status == 401


PLAIN = "This page was loaded over plain HTTP"


def test_page_over_plain_http_from_another_machine_shows_warning(
    browser: Browser, runtimes: Path, tmp_path: Path
) -> None:
    settings = {"admin_password_hash": HASH, "allowed_hosts": ELSEWHERE}
    with gateway(tmp_path, runtimes, whose=Operator(TOKEN), **settings) as server:
        # The browser logs the 401 for the missing API key.
        with visiting(browser, f"http://{ELSEWHERE}:{server.port}/#/operate", clean=False) as page:
            expect(page.get_by_label("Password, or the server's token")).to_be_visible()
            expect(page.get_by_text(PLAIN)).to_be_visible()
            check_access(page)
        with visiting(browser, f"{server.url}/#/operate", clean=False) as page:
            expect(page.get_by_label("Password, or the server's token")).to_be_visible()
            expect(page.get_by_text(PLAIN)).to_have_count(0)


def test_password_guessing_locks_out_address_with_message(
    browser: Browser, server: Gateway
) -> None:
    with visiting(browser, f"{server.url}/#/operate", clean=False) as page:
        for _ in range(login.FROM_ADDRESS):
            assert page.request.post(f"{server.url}/login", data={"password": "x"}).status == 401
        enter(page, PASSWORD)
        expect(page.get_by_role("alert").filter(has_text="Too many passwords")).to_be_visible()
        enter(page, TOKEN)
        is_in(page)


ATTACK = """\
<!doctype html><title>another site</title>
<form id="form" method="post" action="{server}/admin/callbacks/retry" enctype="text/plain" target="frame">
<input name='{{"all": true, "x": "' value='"}}'></form><iframe name="frame"></iframe>
<script>
const body = JSON.stringify({{all: true}});
const tried = (options) => fetch("{server}/admin/callbacks/retry",
  {{method: "POST", credentials: "include", body, ...options}}).then((a) => a.type, (e) => e.name);
(async () => {{
  document.getElementById("form").submit();
  const found = [await tried({{mode: "no-cors"}}), await tried({{}}),
    await tried({{headers: {{"X-CSRF-Token": "x"}}}}),
    await fetch("{server}/session", {{credentials: "include"}}).then((a) => a.text(), (e) => e.name)];
  document.title = JSON.stringify(found);
}})();
</script>"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["same site", "other site"])
def test_page_of_another_origin_cannot_call_admin_routes(
    browser: Browser, server: Gateway, host: str
) -> None:
    async def attack(_: Request) -> Response:
        return HTMLResponse(ATTACK.format(server=server.url))

    with (
        serving(Starlette(routes=[Route("/", attack)])) as evil,
        visiting(browser, f"{server.url}/#/operate") as page,
    ):
        enter(page, PASSWORD)
        is_in(page)
        other = page.context.new_page()
        other.goto(evil.replace("127.0.0.1", host))
        other.wait_for_function("document.title.startsWith('[')")
        assert other.title() == '["TypeError","TypeError","TypeError","TypeError"]'
        events = page.request.get(f"{server.url}/admin/events").json()["events"]
        assert [event["kind"] for event in events] == ["login"]


# Models and keys of a real server


@pytest.fixture(scope="module")
def place(
    server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("operated")
    with contextlib.contextmanager(a_place)(server_environment, folder / "sessions") as operator:
        yield operator


@pytest.fixture(scope="module")
def url(place: Place) -> str:
    accounts = place.root.parent / "accounts.sqlite"
    started: str = place.start(
        NDIF_ADMIN_PASSWORD_HASH=HASH,
        NDIF_DATABASE_URL=f"sqlite:///{accounts}",
        NDIF_ACCOUNTS_CACHE_S="0.1",
    )["url"]
    return started


@pytest.fixture
def operated(browser: Browser, url: str) -> Iterator[Page]:
    """The operator's views after login; the browser must log no problem."""
    with visiting(browser, f"{url}/#/operate") as page:
        enter(page, PASSWORD)
        is_in(page)
        yield page


def confirm(page: Page, verb: str) -> None:
    page.get_by_role("dialog").get_by_role("button", name=verb, exact=True).click()


def test_deploy_form_shows_progress(operated: Page) -> None:
    page, held = operated, []
    page.route("**/admin/deploy", lambda route: held.append(route))
    page.get_by_label("Model", exact=True).fill("org/far-away")
    page.get_by_role("button", name="Deploy").click()
    at_it = page.get_by_text("Measuring org/far-away")
    expect(at_it).to_be_visible()
    held[0].fulfill(json={"models": [{"problem": "It is broken."}]})
    expect(page.get_by_text("It is broken.")).to_be_visible()
    expect(at_it).to_be_hidden()


def test_operator_deploys_and_evicts_model_on_page(operated: Page) -> None:
    page = operated
    expect(page.get_by_text("No model is deployed.")).to_be_visible()
    page.get_by_label("Model", exact=True).fill(NAME)
    page.get_by_label("Dedicated").check()
    page.get_by_role("button", name="Deploy").click()
    row = page.get_by_role("row").filter(has_text=NAME).first
    expect(row).to_contain_text("HOT")
    expect(row).to_contain_text("serving")
    check_access(page)
    # Cancelling the dialog changes nothing.
    page.get_by_role("button", name=f"Evict {NAME} from memory").click()
    confirm(page, "Cancel")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(row).to_contain_text("HOT")
    page.get_by_role("button", name=f"Evict {NAME} from memory").click()
    expect(page.get_by_role("dialog")).to_contain_text(NAME)
    check_access(page)
    confirm(page, "Evict")
    expect(row).to_contain_text("COLD")
    expect(page.get_by_text(f"{NAME} is evicted.")).to_be_visible()
    page.get_by_role("link", name="Events").click()
    for kind in ("deployed", "evicted"):
        event = page.get_by_role("row").filter(has_text=kind).filter(has_text=NAME)
        expect(event.first).to_contain_text("login")
    page.get_by_label("Kind").select_option("evicted")
    expect(page.get_by_role("row").filter(has_text="deployed")).to_have_count(0)
    expect(page.get_by_role("row").filter(has_text="evicted").first).to_be_visible()
    page.get_by_role("link", name="Usage").click()
    page.get_by_label("By", exact=True).select_option("day")
    expect(page.get_by_label("By", exact=True)).to_have_value("day")
    page.get_by_role("link", name="Models and jobs").click()
    page.get_by_label("nnsight", exact=True).select_option("0.8")
    expect(page.get_by_label("nnsight", exact=True)).to_have_value("0.8")
    check_access(page)


def test_operator_creates_uses_and_revokes_key_on_page(operated: Page, url: str) -> None:
    page = operated
    page.get_by_role("link", name="Keys and tiers").click()
    page.get_by_label("Tier", exact=True).fill("lab")
    page.get_by_label("hotswapping").check()
    page.get_by_role("button", name="Create a tier").click()
    expect(page.get_by_role("rowheader", name="lab")).to_be_visible()
    page.get_by_label("User", exact=True).fill("<img src=x onerror=alert(1)>")
    page.get_by_label("lab", exact=True).check()
    page.get_by_role("button", name="Create a key").click()
    key = page.get_by_label("the new key", exact=True).inner_text()
    assert key.startswith("ndif_")
    headers = {"ndif-api-key": key}

    def answered() -> int:
        return httpx.get(f"{url}/usage", headers=headers, trust_env=False).status_code

    assert answered() == 200
    assert page.locator("img").count() == 0  # the name is rendered as text
    check_access(page)
    page.get_by_role("button", name="Done").click()
    assert key not in page.content()
    page.reload()
    assert key not in page.content()
    row = page.get_by_role("row").filter(has_text="onerror")
    expect(row).to_contain_text("lab")
    row.get_by_role("button", name="Revoke").click()
    confirm(page, "Revoke")
    expect(row).to_contain_text("REVOKED")
    expect(row).to_contain_text("lab")
    expect(row.get_by_role("button")).to_have_count(0)
    until(lambda: answered() == 401)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_admin_view_is_accessible_and_fits_phone(operated: Page, scheme: Any) -> None:
    page = operated
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(PHONE)
    for view in (
        "Models and jobs",
        "Keys and tiers",
        "Usage",
        "Events",
        "Webhooks and mail",
        "Calendar",
    ):
        page.get_by_role("link", name=view).click()
        expect(page.get_by_text("Loading…")).to_have_count(0)
        check_access(page)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], view
