"""The dashboard of real servers of each size while jobs of a real client run."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import zstandard
from playwright.sync_api import Browser, expect

from tests.cli.test_start import free_port
from tests.clients.harness import Client, LocalServer, StartedServer
from tests.conftest import NAME, client_environment
from tests.dashboard.browser import chromium, visiting
from tests.services.packages import need
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

KEYS = {"ada": "the-key-of-ada", "bob": "the-key-of-bob"}
SIZES = ("one process", "many")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(need("chromium", "chromium")) as browser_of_tests:
        yield browser_of_tests


@pytest.fixture(scope="module", params=SIZES)
def started(
    request: pytest.FixtureRequest,
    server_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StartedServer]:
    """`ndif start` with two users and login mode: one process, or two gateways with a broker."""
    folder = tmp_path_factory.mktemp("dashboard")
    keys = folder / "keys.yaml"
    lines = (f"- {{key: {key}, user: {user}}}\n" for user, key in KEYS.items())
    keys.write_text(f"keys:\n{''.join(lines)}")
    keys.chmod(0o600)
    broker = {}
    if request.param == "many":
        need("redis-server", "redis-server")
        url = f"redis://:secret@127.0.0.1:{free_port()}/0"  # which `ndif start` starts
        broker = {"NDIF_BROKER_URL": url, "NDIF_API_WORKERS": "2"}
    server = StartedServer(
        NAME,
        environment={
            **server_environment,
            **broker,
            "NDIF_SESSION_ROOT": str(folder / "session"),
            "NDIF_API_KEYS": str(keys),
            "NDIF_DASHBOARD": "login",
        },
    )
    try:
        server.ready()
        until(lambda: server.get(f"/hub/api/models/{NAME}")[0] == 200)
        yield server
    finally:
        server.stop()


def test_running_job_is_shown_and_cancelled_on_page(
    browser: Browser, started: StartedServer, tiny_gpt2: Path, tmp_path: Path
) -> None:
    environment = {**client_environment(started, tmp_path, None), "NDIF_API_KEY": KEYS["ada"]}
    client = Client("scenarios_dashboard", NAME, tiny_gpt2, environment)
    with (
        visiting(browser, started.url, clean=False) as page,
        visiting(browser, f"{started.url}/#/jobs", key=KEYS["bob"]) as others,
        ThreadPoolExecutor(1) as pool,
    ):
        page.get_by_label("API key").fill(KEYS["ada"])
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#models tr", has_text=NAME)).to_contain_text("serving")
        client.run("scenario_a_result_is_left")
        page.get_by_role("link", name="My jobs").click()
        # Otherwise the page may still show this job as running when the next job starts.
        expect(page.locator("#jobs tr", has_text="completed")).to_be_visible()
        page.get_by_role("link", name="Overview").click()
        running = pool.submit(client.run, "scenario_a_job_runs_until_somebody_ends_it")
        queue = page.locator("#queues tr", has_text=NAME)
        expect(queue.locator("td").first).to_have_text("1")
        page.get_by_role("link", name="My jobs").click()
        live = page.locator("#jobs tr:not(.below)", has_text="running")
        live.get_by_role("button", name="Timeline").click()
        expect(page.locator(".timeline")).to_contain_text("queued")
        job = live.locator("code").inner_text()
        live.get_by_role("button", name="Cancel").click()
        live.get_by_role("button", name="End the job?").click()
        expect(page.locator(".said")).to_have_text(f"The job {job} is ended.")
        running.result()
        expect(page.locator("#jobs tr", has_text=job).first).to_contain_text("cancelled")
        page.locator("#jobs tr", has_text=job).first.get_by_role("button", name="Timeline").click()
        row = page.locator("#jobs tr", has_text="completed")
        row.get_by_role("button", name="Timeline").click()
        with page.expect_download() as download:
            page.locator(".timeline").get_by_role("button", name="Download").click()
        assert download.value.suggested_filename.endswith(".pt.zst")
        with (
            download.value.path().open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as content,
        ):
            assert torch.load(io.BytesIO(content.read()), weights_only=False)
        expect(page.locator("#usage tbody tr")).to_contain_text(NAME)
        expect(others.locator("#jobs")).to_contain_text("You have no jobs here yet")
        # The job history is read periodically.
        page.get_by_role("link", name="Overview").click()
        expect(page.locator("#throughput")).to_contain_text("2 jobs ended")
    client.close()
    assert not any("Traceback" in line for line in started.output), [*started.output]


def test_open_stream_does_not_delay_shutdown(started: StartedServer) -> None:
    headers = {"ndif-api-key": KEYS["ada"]}
    url = f"{started.url}/dashboard/events"
    with httpx.stream("GET", url, headers=headers, verify=False) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: me"
        assert started.stop() == 0
        # The stream ends properly.
        assert [*lines][-1] == ""
    assert not any("timeout" in line for line in started.output), [*started.output]


def test_local_server_shows_dashboard_to_owner(browser: Browser, server: LocalServer) -> None:
    with visiting(browser, server.url) as page:
        expect(page.locator("#models tr", has_text=NAME)).to_contain_text("serving")
        page.get_by_role("link", name="My jobs").click()
        expect(page.locator("#limits")).to_contain_text("Unfinished jobs at once")
        page.get_by_role("link", name="Connect").click()
        expect(page.locator("#connect")).to_contain_text(f"export NDIF_HOST={server.url}")
