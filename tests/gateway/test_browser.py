"""A real browser: access of other pages to a server, and the `/docs` page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ndif.server.embedded import Operator
from tests.security.serving import gateway
from tests.services.packages import need
from tests.serving import serving
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.browser

PAGE = """\
<!doctype html><title>a notebook</title><script>
const server = new URLSearchParams(location.search).get("server");
async function tried(asked) {
  try { return await asked(); } catch (error) { return error.name; }
}
const ask = (path, options) => tried(async () => {
  const answer = await fetch(server + path, options);
  return [answer.status, answer.headers.get("X-Request-Id"), (await answer.text()).slice(0, 60)];
});
const live = () => new Promise((done) => {
  const channel = new WebSocket(server.replace("http", "ws") + "/subscribe");
  channel.onmessage = (message) => done(Object.keys(JSON.parse(message.data)));
  channel.onerror = () => done("refused");
});
(async () => {
  const found = {
    ping: await ask("/ping"),
    whoami: await ask("/whoami", {headers: {"ndif-api-key": "a"}}),
    submit: await ask("/request", {method: "POST", headers: {"nnsight-version": "0.8.1"}}),
    simple: await ask("/request", {method: "POST", body: "x"}),
    admin: await ask("/admin/status", {headers: {"Authorization": "Bearer opens-it"}}),
    live: await live(),
  };
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>
"""


class Browser:
    """Chromium without a window."""

    def __init__(self, program: str, folder: Path) -> None:
        self._command = [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions"),
            *(f"--user-data-dir={folder}", "--no-proxy-server"),
        ]

    def show(self, url: str) -> tuple[str, str]:
        """Return the rendered page and the browser's log."""
        process = subprocess.run(
            [*self._command, "--enable-logging=stderr", "--log-level=0", "--dump-dom", url],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return process.stdout, process.stderr

    @contextlib.contextmanager
    def visiting(self, url: str) -> Iterator[None]:
        """Keep the page open during the block."""
        process = subprocess.Popen(
            [*self._command, "--remote-debugging-port=0", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


@dataclass
class Notebook:
    """A page of another site, which reports the results of its requests to its own server."""

    url: str = ""
    found: Queue[dict[str, Any]] = field(default_factory=Queue)

    def tries(self, browser: Browser, server: str) -> dict[str, Any]:
        """Return the results of the page's requests to a server."""
        with browser.visiting(f"{self.url}/?server={server}"):
            return self.found.get(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(need("chromium", "chromium"), tmp_path_factory.mktemp("chromium"))


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    site = Notebook()

    async def page(_: Request) -> Response:
        return HTMLResponse(PAGE)

    async def receive_results(http: Request) -> Response:
        site.found.put(json.loads(await http.body()))
        return Response()

    routes = [Route("/", page), Route("/found", receive_results, methods=["POST"])]
    with serving(Starlette(routes=routes)) as site.url:
        yield site


BLOCKED = "TypeError"
"""The browser kept the answer from the page."""


def test_page_of_another_site_is_blocked(
    browser: Browser, notebook: Notebook, runtimes: Path, tmp_path: Path
) -> None:
    with gateway(tmp_path, runtimes, whose=Operator("opens-it")) as server:
        results = notebook.tries(browser, server.url)
    assert results == {**dict.fromkeys(results, BLOCKED), "live": "refused"}
    assert len(results) == 6


def test_page_of_another_site_can_ping_public_server(
    browser: Browser, notebook: Notebook, runtimes: Path, tmp_path: Path
) -> None:
    public = "http://ndif.example.org"
    with gateway(tmp_path, runtimes, whose=Operator("opens-it"), public_url=public) as server:
        results = notebook.tries(browser, server.url)
    status, request_id, body = results.pop("ping")
    assert (status, body) == (200, '"pong"')
    assert re.fullmatch("[0-9a-f]{32}", request_id)
    assert results == {**dict.fromkeys(results, BLOCKED), "live": "refused"}


def test_page_named_by_operator_can_use_but_not_operate_server(
    browser: Browser, notebook: Notebook, runtimes: Path, tmp_path: Path
) -> None:
    with gateway(
        tmp_path, runtimes, whose=Operator("opens-it"), cors_origins=notebook.url
    ) as server:
        results = notebook.tries(browser, server.url)
    assert results["ping"][0] == 200
    assert results["whoami"][0] == 200
    assert results["submit"][0] == 400
    assert "neither a request" in results["simple"][2]
    assert results["admin"] == BLOCKED
    assert results["live"] == ["session_id"]


def test_docs_page_is_shown_without_policy_violation(
    browser: Browser, runtimes: Path, tmp_path: Path
) -> None:
    with gateway(tmp_path, runtimes, whose=Operator("opens-it")) as server:
        page, log = browser.show(f"{server.url}/docs")
    assert "<h2>jobs</h2>" in page
    assert page.count("<details") > 40
    assert "/admin/deploy" in page
    # The page's policy blocks no part of the page.
    assert "Content Security Policy" not in log, log
    assert "Refused" not in log, log


def test_browser_logs_policy_violation(browser: Browser) -> None:
    """Show that the test above can fail."""

    async def page(_: Request) -> Response:
        policy = {"Content-Security-Policy": "default-src 'none'"}
        return HTMLResponse("<style>p { color: red }</style>", headers=policy)

    with serving(Starlette(routes=[Route("/", page)])) as url:
        _, log = browser.show(url)
    assert "Content Security Policy" in log
