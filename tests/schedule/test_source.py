from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ndif.schedule.expansion import CalendarError, Expansion
from ndif.schedule.source import ScheduleSource, expand_in_process
from ndif.schema.deployment import DeploymentConfig
from tests.on_loop import on_loop
from tests.schedule.calendars import calendar, event

pytestmark = pytest.mark.process

NOW = datetime(2026, 10, 5, 12, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)


def dedicating(name: str) -> bytes:
    """Return a calendar that dedicates one model all October."""
    month = ("DTSTART;VALUE=DATE:20261001", "DTEND;VALUE=DATE:20261101")
    return calendar(event(*month, summary=name)).encode()


@dataclass
class Site:
    """A web server's answers, and the requests to it."""

    url: str = ""
    status: int = 200
    body: bytes = dedicating("org/first")
    headers: dict[str, str] = field(default_factory=dict)
    may_answer: threading.Event = field(default_factory=threading.Event)
    conditional: bool = True
    asked: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[Site]:
    site = Site()
    site.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append({name.lower(): value for name, value in self.headers.items()})
            site.paths.append(self.path)
            site.may_answer.wait()
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/calendar.ics")
                self.end_headers()
                return
            same = site.headers.get("ETag", "none") == self.headers.get("If-None-Match")
            status = 304 if site.status == 200 and same and site.conditional else site.status
            self.send_response(status)
            for name, value in site.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if status == 200:
                self.wfile.write(site.body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.url = f"http://127.0.0.1:{server.server_port}/private-0123secret/calendar.ics"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


async def dedicated(source: ScheduleSource, now: datetime = NOW) -> list[str]:
    schedule = await source.refresh(now)
    return [window.config.repo_id for window in schedule.dedicated_at(now)]


# An address


@on_loop
async def test_schedule_is_reread_only_if_changed() -> None:
    with serving() as site:
        site.headers = {"ETag": '"1"', "Last-Modified": "Thu, 01 Oct 2026 10:00:00 GMT"}
        source = ScheduleSource(site.url)
        first = await source.refresh(NOW)
        assert [window.config.repo_id for window in first.dedicated_at(NOW)] == ["org/first"]
        assert await source.refresh(NOW + MINUTE) is first
        assert "if-none-match" not in site.asked[0]
        assert site.asked[1]["if-none-match"] == '"1"'
        assert site.asked[1]["if-modified-since"] == "Thu, 01 Oct 2026 10:00:00 GMT"
        site.headers, site.body = {"ETag": '"2"'}, dedicating("org/second")
        assert await dedicated(source) == ["org/second"]
        assert source.problems == ()


@on_loop
async def test_unchanged_text_keeps_schedule() -> None:
    with serving() as site:
        source = ScheduleSource(site.url)
        first = await source.refresh(NOW)
        site.headers = {"ETag": '"1"'}
        assert await source.refresh(NOW + MINUTE) is first
        assert await source.refresh(NOW + MINUTE) is first
        assert [headers.get("if-none-match") for headers in site.asked] == [None, None, '"1"']


@on_loop
async def test_unchanged_calendar_is_expanded_again_for_later_time() -> None:
    with serving() as site:
        site.headers = {"ETag": '"1"'}
        yearly = event("DTSTART;VALUE=DATE:20261001", "RRULE:FREQ=YEARLY", summary="org/yearly")
        site.body = calendar(yearly).encode()
        source = ScheduleSource(site.url)
        assert await dedicated(source) == []
        assert await dedicated(source, datetime(2036, 10, 1, 12, tzinfo=timezone.utc)) == [
            "org/yearly"
        ]
        assert len(site.asked) == 2


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"", "HTTP 500 Internal Server Error"),
        (404, b"", "HTTP 404 Not Found"),
        (304, b"", "HTTP 304 Not Modified"),
        (200, b"<!doctype html><title>Sign in</title>", "it is no calendar: it begins with '<!doc"),
        (200, dedicating("org/other")[:-20], "it is cut off"),
        (200, b"x" * 10_000_001, "it is larger than 10 MB"),
        (200, b"", "it is no calendar"),
    ],
    ids=["500", "404", "304", "html", "cut off", "too large", "empty"],
)
@on_loop
async def test_last_good_schedule_is_kept_after_bad_answer(
    status: int, body: bytes, why: str
) -> None:
    with serving() as site:
        site.conditional = False
        source = ScheduleSource(site.url)
        good = (site.status, site.body)
        site.status, site.body = status, body
        assert await dedicated(source) == []
        (problem,) = source.problems
        assert problem.startswith(f"The schedule at http://127.0.0.1/… cannot be read ({why}")
        assert problem.endswith("): no model is dedicated by it.")
        site.status, site.body = good
        assert await dedicated(source) == ["org/first"]
        assert source.problems == ()
        if status == 304:
            return
        site.status, site.body = status, body
        site.headers = {"ETag": '"bad"'}
        for minutes in (1, 2):
            assert await dedicated(source, NOW + minutes * MINUTE) == ["org/first"]
            (problem,) = source.problems
            assert why in problem
            assert problem.endswith("): the schedule of 2026-10-05 12:00 UTC still applies.")
            assert "secret" not in problem
        # A rejected answer's ETag is not used.
        assert "if-none-match" not in site.asked[-1]
        site.status, site.body = good
        assert await dedicated(source) == ["org/first"]
        assert source.problems == ()


@on_loop
async def test_kept_schedule_is_expanded_for_later_time() -> None:
    with serving() as site:
        daily = event("DTSTART;VALUE=DATE:20261001", "RRULE:FREQ=DAILY", summary="org/daily")
        site.body = calendar(daily).encode()
        source = ScheduleSource(site.url)
        await source.refresh(NOW)
        site.status = 503
        assert await dedicated(source, NOW + timedelta(days=1000)) == ["org/daily"]
        assert "503" in source.problems[0]


@on_loop
async def test_unresponsive_calendar_server_times_out() -> None:
    with serving() as site:
        site.may_answer.clear()
        source = ScheduleSource(site.url, timeout_s=0.2)
        assert await dedicated(source) == []
        assert "cannot be read (" in source.problems[0]
        site.may_answer.set()


@on_loop
async def test_unreachable_calendar_server_is_reported() -> None:
    with serving() as site:
        url = site.url
    source = ScheduleSource(url)
    assert await dedicated(source) == []
    assert "cannot be read (ConnectError" in source.problems[0]


def test_private_address_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    @on_loop
    async def refresh() -> None:
        with serving() as site:
            assert await dedicated(ScheduleSource(site.url)) == ["org/first"]

    refresh()
    assert "secret" not in caplog.text


@on_loop
async def test_redirect_is_followed() -> None:
    with serving() as site:
        source = ScheduleSource(site.url.rsplit("/", 2)[0] + "/moved")
        assert await dedicated(source) == ["org/first"]
        assert site.paths == ["/moved", "/calendar.ics"]


def test_webcal_address_becomes_https() -> None:
    for scheme in ("webcal", "WEBCAL", "webcals", "https"):
        source = ScheduleSource(f"{scheme}://calendar.example.org/basic.ics?a=b")
        assert source._url == "https://calendar.example.org/basic.ics?a=b"


@on_loop
async def test_concurrent_refreshes_run_sequentially() -> None:
    with serving() as site:
        site.headers = {"ETag": '"1"'}
        source = ScheduleSource(site.url)
        schedules = await asyncio.gather(*(source.refresh(NOW) for _ in range(5)))
        assert len({id(schedule) for schedule in schedules}) == 1
        assert [headers.get("if-none-match") for headers in site.asked] == [None, *['"1"'] * 4]


# A file


@on_loop
async def test_file_is_reread_after_change(tmp_path: Path) -> None:
    path = tmp_path / "models.ics"
    path.write_bytes(dedicating("org/first"))
    for address in (str(path), f"file://{path}"):
        source = ScheduleSource(address)
        first = await source.refresh(NOW)
        assert [window.config.repo_id for window in first.dedicated_at(NOW)] == ["org/first"]
        assert await source.refresh(NOW + MINUTE) is first
    path.write_bytes(dedicating("org/other"))
    os.utime(path, ns=(1, 1))
    assert await dedicated(source) == ["org/other"]


@on_loop
async def test_missing_or_bad_file_keeps_last_good_schedule(tmp_path: Path) -> None:
    path = tmp_path / "models.ics"
    source = ScheduleSource(str(path))
    assert await dedicated(source) == []
    assert source.problems == (
        f"The schedule at {path} cannot be read (No such file or directory): no model is dedicated "
        "by it.",
    )
    path.write_bytes(dedicating("org/first"))
    assert await dedicated(source) == ["org/first"]
    path.write_bytes(b"nothing")
    assert await dedicated(source) == ["org/first"]
    assert "it is no calendar: it begins with 'nothing'" in source.problems[0]
    path.unlink()
    assert await dedicated(source) == ["org/first"]
    assert "No such file or directory" in source.problems[0]
    path.mkdir()
    assert await dedicated(source) == ["org/first"]
    assert "it is not a file" in source.problems[0]


@on_loop
async def test_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    source = ScheduleSource(str(path))
    assert await dedicated(source) == []
    assert "it is not a file" in source.problems[0]


@on_loop
async def test_problems_of_calendar_and_source_are_both_reported(tmp_path: Path) -> None:
    path = tmp_path / "models.ics"
    path.write_bytes(calendar(event("DTSTART:x")).encode())
    source = ScheduleSource(str(path))
    await source.refresh(NOW)
    assert source.problems == ("The event 'org/model' of x has a DTSTART that is no date: 'x'.",)
    path.unlink()
    await source.refresh(NOW)
    assert len(source.problems) == 2


@on_loop
async def test_calendar_that_takes_too_long_keeps_last_good_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "models.ics"
    path.write_bytes(dedicating("org/first"))
    source = ScheduleSource(str(path))
    assert await dedicated(source) == ["org/first"]
    monkeypatch.setattr("ndif.schedule.source._EXPANSION_S", 0.0)  # no process is that fast
    path.write_bytes(dedicating("org/second") + b"\n")
    assert await dedicated(source, NOW + MINUTE) == ["org/first"]
    assert "(it takes longer than 0s to read): the schedule of 2026-10-05" in source.problems[0]


@on_loop
async def test_failed_expansion_process_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "models.ics"
    path.write_bytes(dedicating("org/first"))
    source = ScheduleSource(str(path), zone="Atlantis")
    assert await dedicated(source) == []
    assert "takes more than 30s of CPU time or 512 MiB of memory" in source.problems[0]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (CalendarError("it takes longer than 2min to read"), "it takes longer than 2min to read"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource temporarily"),
    ],
)
@on_loop
async def test_schedule_is_kept_if_its_calendar_cannot_be_expanded_again(
    tmp_path: Path, error: Exception, why: str
) -> None:
    path = tmp_path / "models.ics"
    path.write_bytes(dedicating("org/first"))
    fails = False

    async def expand(content: bytes, zone: str, since: datetime, until: datetime) -> Expansion:
        if fails:
            raise error
        return await expand_in_process(content, zone, since, until)

    source = ScheduleSource(str(path), expand=expand)
    assert await dedicated(source) == ["org/first"]
    fails = True
    later = NOW + timedelta(days=1)
    assert await dedicated(source, later) == ["org/first"]
    assert f"cannot be read ({why}" in source.problems[0]
    assert "the schedule of 2026-10-05 12:00 UTC still applies" in source.problems[0]
    path.unlink()
    assert await dedicated(source, later) == ["org/first"]
    assert "No such file" in source.problems[0]
    fails = False
    path.write_bytes(dedicating("org/first"))
    assert await dedicated(source, later) == ["org/first"]
    assert source.problems == ()


@on_loop
async def test_changed_deployments_change_schedule(tmp_path: Path) -> None:
    path = tmp_path / "models.ics"
    path.write_bytes(dedicating("org/first"))
    source = ScheduleSource(str(path))
    await source.refresh(NOW)
    source.deployments = (DeploymentConfig("org/first", "/models/first"),)
    (window,) = (await source.refresh(NOW)).dedicated_at(NOW)
    assert window.config.checkpoint == "/models/first"
