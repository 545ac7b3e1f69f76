"""A real browser for tests: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.waiting import PATIENCE_S

PATIENCE_MS = 1000 * PATIENCE_S
ELSEWHERE = "ndif.test"
"""Name of this machine's loopback address that the browser treats like another machine's."""
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@contextlib.contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """Start Chromium without a window."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=[
                "--no-sandbox",
                "--no-proxy-server",
                f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
            ],
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def visiting(
    browser: Browser, url: str, *, key: str = "", clean: bool = True, **options: Any
) -> Iterator[Page]:
    """Open the page at an address, with an API key if given; `clean`: the page must show no errors."""
    with browser.new_context(**{"viewport": DESKTOP, **options}) as context:
        context.set_default_timeout(PATIENCE_MS)
        if key:
            context.add_init_script(f"sessionStorage.setItem('ndif-api-key', '{key}')")
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: (
                wrong.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(url)
        yield page
        if clean:
            assert wrong == []


def check_access(page: Page) -> None:
    """Assert that axe finds no serious or critical accessibility problem in the page's current state."""
    violations = Axe().run(page).response["violations"]
    grave = [
        violation for violation in violations if violation["impact"] in ("serious", "critical")
    ]
    assert not grave, [
        (violation["id"], [node["html"][:200] for node in violation["nodes"][:3]])
        for violation in grave
    ]
