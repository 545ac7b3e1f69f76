"""The dashboard in a real browser: content, access, colours and keyboard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from playwright.sync_api import Browser, Locator, Page, expect

from ndif.stores.objects import FileStore, ObjectStoreError
from ndif.stores.objects.port import end_key, result_key
from ndif.stores.responder import StoredResponse
from tests.dashboard.browser import PHONE, check_access, chromium, visiting
from tests.dashboard.sample import (
    DONE,
    FAILED,
    FETCHED,
    KEY,
    RESULT,
    RUNNING,
    USER,
    Laboratory,
    served,
)
from tests.services.packages import need
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer

pytestmark = pytest.mark.browser

VIEWS = ("", "jobs", "connect")
HOSTILE = "<img src=x onerror=alert(1)>"
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(need("chromium", "chromium")) as started:
        yield started


@pytest.fixture
def laboratory() -> Laboratory:
    return Laboratory()


@pytest.fixture
def url(laboratory: Laboratory, tmp_path: Path) -> Iterator[str]:
    with served(laboratory, tmp_path) as base_url:
        yield base_url


MARKUP = (
    "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
)
STYLE = """() => {
    const style = document.createElement("style");
    style.textContent = "* { color: red }";
    document.head.append(style);
}"""


def is_ready(page: Page) -> None:
    """Wait until the page is live."""
    expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
    expect(page.locator("main section").first).to_be_visible()


def test_anonymous_visitor_sees_state_but_no_jobs(browser: Browser, url: str) -> None:
    with visiting(browser, url) as page:
        is_ready(page)
        for heading in ("Models", "Cluster", "Queues", "Throughput", "Latency", "Schedule"):
            expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        row = page.locator("#models tr", has_text="Llama-3.1-70B")
        expect(row).to_contain_text("HOT")
        expect(row).to_contain_text("dedicated")
        expect(page.locator("#models tr", has_text="gpt2")).to_contain_text("for 35 min")
        expect(page.locator("#queues tr", has_text="Llama-3.1-70B")).to_contain_text("about 2 min")
        expect(page.locator("#cluster")).to_contain_text("gpu-2")
        expect(page.get_by_role("meter").first).to_have_attribute(
            "aria-valuetext", "75 GiB of 80 GiB"
        )
        page.get_by_text("windows as a list").click()
        expect(page.locator("#schedule li").first).to_contain_text("Reading group")
        assert "ada@example.org" not in page.content()
        assert RUNNING not in page.content()


def test_change_is_shown_without_new_requests(
    browser: Browser, laboratory: Laboratory, url: str
) -> None:
    asked = []
    with visiting(browser, url) as page:
        is_ready(page)
        page.on("request", lambda request: asked.append(request.url))
        laboratory.state["models"][0]["generations"][0]["waiting"] = 11
        laboratory.state["problems"] = ["GPU 3 of gpu-1 fails."]
        laboratory.change()
        expect(page.locator("#queues tr", has_text="Llama-3.1-70B")).to_contain_text("11")
        expect(page.get_by_role("region", name="Problems")).to_contain_text("GPU 3 of gpu-1 fails.")
    assert asked == []


def test_names_are_rendered_as_text(browser: Browser, laboratory: Laboratory, url: str) -> None:
    state = laboratory.state
    state["models"][0].update(repo_id=HOSTILE, task=HOSTILE, revision=HOSTILE, problems=[HOSTILE])
    state["nodes"][0]["name"] = HOSTILE
    state["nodes"][0]["gpus"][0]["held"][0]["model"] = HOSTILE
    state["problems"] = [HOSTILE]
    state["schedule"][0].update(model=HOSTILE, title=HOSTILE)
    for job in laboratory.jobs:
        job["model"] = HOSTILE
    with visiting(browser, url, key=KEY) as page:
        for view in VIEWS:
            page.goto(f"{url}/#/{view}")
            is_ready(page)
            shown = {"": "#models", "jobs": "#jobs tbody", "connect": "#connect option"}[view]
            expect(page.locator(shown).first).to_contain_text(HOSTILE)
            assert page.locator("img").count() == 0


def test_browser_blocks_markup_and_foreign_styles(browser: Browser, url: str) -> None:
    """Show that the policy is in force and that the browser logs violations."""
    with visiting(browser, url, clean=False) as page:
        is_ready(page)
        assert page.evaluate(MARKUP) == "TypeError"
        with page.expect_event(
            "console", lambda message: "Content Security Policy" in message.text
        ):
            page.evaluate(STYLE)


def test_user_sees_and_cancels_own_jobs(browser: Browser, laboratory: Laboratory, url: str) -> None:
    with visiting(browser, f"{url}/#/jobs") as page:
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use key").click()
        row = page.locator("#jobs tr:not(.below)", has_text=RUNNING[:8])
        expect(row).to_contain_text("running")
        expect(page.locator("#jobs tr", has_text="number 3, starts in 42 s")).to_be_visible()
        expect(page.locator("#usage")).to_contain_text("meta-llama/Llama-3.1-70B")
        expect(page.locator("#limits")).to_contain_text("1,000, 2 used")
        row.get_by_role("button", name="Timeline").click()
        expect(page.locator(".timeline tr", has_text="execute")).to_contain_text("0.3 s")
        row.get_by_role("button", name="Cancel").click()
        assert laboratory.killed == []
        row.get_by_role("button", name="End the job?").click()
        expect(row).to_contain_text("error")
        assert laboratory.killed == [RUNNING]
        assert KEY not in page.url
        assert page.evaluate("Object.values(localStorage).join()") == ""
        # A reload keeps the key; forgetting the key removes the jobs.
        page.reload()
        expect(row).to_be_visible()
        page.get_by_role("button", name="Forget key").click()
        expect(page.get_by_label("API key")).to_be_visible()
        assert DONE[:8] not in page.content()


def opened(page: Page, job: str) -> Locator:
    """Open the timeline of a job and return it."""
    row = page.locator("#jobs tr:not(.below)", has_text=job[:8])
    row.get_by_role("button", name="Timeline").click()
    expect(page.locator(".timeline")).to_contain_text(job)
    return page.locator(".timeline")


def test_stored_result_can_be_downloaded(browser: Browser, url: str) -> None:
    with visiting(browser, f"{url}/#/jobs", key=KEY) as page:
        expect(page.locator("#jobs tr", has_text=FETCHED[:8])).to_contain_text("completed")
        assert page.get_by_role("button", name="Download").count() == 0
        timeline = opened(page, DONE)
        with page.expect_download() as download:
            timeline.get_by_role("button", name="Download").click()
        assert download.value.suggested_filename == f"{DONE}.pt.zst"
        content = download.value.path().read_bytes()
        assert zstandard.ZstdDecompressor().decompress(content) == RESULT
        expect(timeline).to_contain_text(f"zstd -d {DONE}.pt.zst")
        expect(timeline).to_contain_text(f'torch.load("{DONE}.pt", weights_only=False)')
        check_access(page)
        table = page.locator("#jobs .scroll")
        assert table.evaluate("(each) => each.scrollWidth - each.clientWidth") == 0
        # The client of this job received its result directly.
        expect(opened(page, FETCHED).get_by_role("button")).to_have_count(0)


def test_uncompressed_result_is_downloaded_without_zst_suffix(
    browser: Browser, url: str, tmp_path: Path
) -> None:
    (tmp_path / "stored" / result_key(DONE)).write_bytes(RESULT)
    with visiting(browser, f"{url}/#/jobs", key=KEY) as page:
        timeline = opened(page, DONE)
        with page.expect_download() as download:
            timeline.get_by_role("button", name="Download").click()
        assert download.value.suggested_filename == f"{DONE}.pt"
        assert download.value.path().read_bytes() == RESULT


def test_result_on_s3_is_downloaded_from_s3(
    browser: Browser, url: str, tmp_path: Path, s3: SwiftServer
) -> None:
    pytest.importorskip("obstore", reason="obstore needs Python 3.11")
    from ndif.stores.objects.s3 import S3Address, S3Store

    store = S3Store(S3Address(s3.url, s3.url, ACCESS_KEY, SECRET_KEY, "page"), 60)
    key = result_key(DONE)
    putting = store.put(key, zstandard.ZstdCompressor().compress(RESULT))
    with ThreadPoolExecutor(1) as pool:  # Playwright runs an event loop in this thread
        pool.submit(asyncio.run, putting).result()
    # Responses to clients of 0.6 and 0.7 include the size.
    response = {"description": "", "data": (store.url(key, url), 1)}
    end = StoredResponse({"id": DONE, "status": "COMPLETED", **response}, USER)
    (tmp_path / "stored" / end_key(DONE)).write_bytes(end.encode())
    with visiting(browser, f"{url}/#/jobs", key=KEY) as page:
        timeline = opened(page, DONE)
        with page.expect_download() as download:
            timeline.get_by_role("button", name="Download").click()
        assert download.value.url.startswith(s3.url)
        assert download.value.suggested_filename == f"{DONE}.pt.zst"
        content = download.value.path().read_bytes()
        assert zstandard.ZstdDecompressor().decompress(content) == RESULT
        expect(timeline).to_contain_text("torch.load")


def test_phone_shows_command_that_reads_result(browser: Browser, url: str) -> None:
    options = {"viewport": PHONE, "has_touch": True, "is_mobile": True}
    with visiting(browser, f"{url}/#/jobs", key=KEY, **options) as page:
        timeline = opened(page, DONE)
        with page.expect_download():
            timeline.get_by_role("button", name="Download").click()
        expect(timeline).to_contain_text("torch.load")
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_failed_job_shows_error_and_traceback(browser: Browser, url: str) -> None:
    with visiting(browser, f"{url}/#/jobs", key=KEY) as page:
        timeline = opened(page, FAILED)
        last = "IndexError: <b>12</b> is not the index of a block"
        expect(timeline.locator(".problem")).to_have_text(last)
        expect(timeline.get_by_text("most recent call last")).to_be_hidden()
        timeline.get_by_text("Traceback", exact=True).click()
        expect(timeline.get_by_text("most recent call last")).to_be_visible()
        check_access(page)
        expect(timeline.get_by_role("button")).to_have_count(0)
        expect(opened(page, DONE).locator(".problem")).to_have_count(0)


def test_page_reports_unavailable_store(
    browser: Browser, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(self: FileStore, key: str) -> bytes | None:
        raise ObjectStoreError("the store is away")

    monkeypatch.setattr(FileStore, "get", away)
    with visiting(browser, f"{url}/#/jobs", key=KEY) as page:
        expect(opened(page, DONE)).to_contain_text("cannot reach its store")
        assert page.get_by_role("button", name="Download").count() == 0
        expect(page.locator(".timeline tr", has_text="execute")).to_be_visible()


def test_wrong_key_shows_error(browser: Browser, url: str) -> None:
    with visiting(browser, f"{url}/#/jobs", clean=False) as page:
        page.get_by_label("API key").fill("nobody's")
        page.get_by_role("button", name="Use key").click()
        expect(page.get_by_role("alert")).to_contain_text("API key")


def test_visitor_without_key_sees_login_form(
    browser: Browser, laboratory: Laboratory, tmp_path: Path
) -> None:
    with (
        served(laboratory, tmp_path, "login") as url,
        visiting(browser, url, clean=False) as page,
    ):
        expect(page.get_by_role("heading", name="Log in")).to_be_visible()
        page.get_by_role("link", name="Connect").click()
        expect(page.locator("#connect")).to_contain_text("pip install")
        assert "Llama" not in page.content()
        page.get_by_role("link", name="Overview").click()
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#models")).to_contain_text("Llama-3.1-70B")


def test_page_follows_and_overrides_color_scheme(browser: Browser, url: str) -> None:
    with visiting(browser, url, color_scheme="dark") as page:
        is_ready(page)
        colour = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(colour)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(colour)
        assert dark != light
        toggle = page.get_by_role("button", name="Colours")
        toggle.click()
        assert page.evaluate(colour) == dark
        page.reload()
        is_ready(page)
        assert page.evaluate(colour) == dark
        toggle.click()
        assert page.evaluate(colour) == light
        toggle.click()
        expect(toggle).to_have_accessible_name("Colours: auto")


@pytest.mark.parametrize("view", VIEWS)
def test_phone_view_does_not_scroll_sideways(browser: Browser, url: str, view: str) -> None:
    with visiting(
        browser, f"{url}/#/{view}", key=KEY, viewport=PHONE, has_touch=True, is_mobile=True
    ) as page:
        is_ready(page)
        if view == "jobs":
            page.get_by_role("button", name="Timeline").first.click()
            expect(page.locator(".timeline")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


REACHABLE = "a[href], button:not([disabled]), input, select, summary, [tabindex='0']"
FOCUSED = f"[...document.querySelectorAll(`{REACHABLE}`)].indexOf(document.activeElement)"


@pytest.mark.parametrize("view", VIEWS)
def test_keyboard_reaches_every_control(browser: Browser, url: str, view: str) -> None:
    with visiting(browser, f"{url}/#/{view}", key=KEY) as page:
        is_ready(page)
        wanted = page.evaluate(
            f"""() => [...document.querySelectorAll("{REACHABLE}")].filter(
                (e) => e.checkVisibility() && !(e.type === "radio" && !e.checked)).length"""
        )
        reached = set()
        for _ in range(3 * wanted):
            page.keyboard.press("Tab")
            reached.add(page.evaluate(FOCUSED))
            if len(reached - {-1}) >= wanted:
                break
        assert len(reached - {-1}) == wanted
        # The first control skips the header.
        page.goto(f"{url}/#/{view}")
        page.reload()
        is_ready(page)
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"


def test_page_is_small_and_loads_only_from_its_server(browser: Browser, url: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        loaded: dict[str, int] = {}
        page.on(
            "requestfinished",
            lambda request: loaded.update({request.url: request.sizes()["responseBodySize"]}),
        )
        page.goto(url)
        is_ready(page)
        page.wait_for_load_state("load")
        assert sum(loaded.values()) <= MOST_BYTES / 3
        assert all(address.startswith(url) for address in loaded)
        decoded = page.evaluate(
            "performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))"
            ".reduce((total, each) => total + each.decodedBodySize, 0)"
        )
        assert 0 < decoded <= MOST_BYTES


SLOW_PAINT = """
window.requestAnimationFrame = () => 0;
const later = window.setTimeout;
window.setTimeout = (run, delay, ...given) => later(run, delay > 0 && delay < 500 ? 2000 : delay, ...given);
"""
"""A script that delays the first paint until after the server's state arrives."""


def test_state_received_before_first_paint_is_shown(browser: Browser, url: str) -> None:
    with browser.new_context() as context:
        context.add_init_script(SLOW_PAINT)
        page = context.new_page()
        page.goto(url)
        is_ready(page)


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_accessible(browser: Browser, url: str, view: str, colours: str) -> None:
    with visiting(browser, f"{url}/#/{view}", key=KEY, color_scheme=colours) as page:
        is_ready(page)
        if view == "jobs":
            page.get_by_role("button", name="Timeline").first.click()
            expect(page.locator(".timeline")).to_be_visible()
        check_access(page)
