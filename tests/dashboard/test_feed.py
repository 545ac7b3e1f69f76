"""The feed: it reads the state once for all pages, sends only changes, and hides jobs of other users."""

from __future__ import annotations

import json

import pytest

from ndif.dashboard import feed as feed_module
from ndif.dashboard.feed import Feed
from ndif.schema.deployment import OperationError
from tests.dashboard.sample import RUNNING, USER, WAITING, Laboratory
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S, time_passes_async

SOON_S, NOTHING_S = PATIENCE_S, 0.3


def parts_of(events: bytes) -> dict[str, object]:
    """Return the data of events by event name."""
    parts = {}
    for event in events.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        parts[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
    return parts


@on_loop
async def test_feed_reads_state_once_for_all_pages_and_sends_only_changes() -> None:
    laboratory = Laboratory()
    feed = Feed(laboratory.next)
    with feed.subscribe(None) as first_page, feed.subscribe(None) as other:
        first = parts_of(await first_page.next(SOON_S))
        assert first == laboratory.state
        assert parts_of(await other.next(SOON_S)) == first
        assert laboratory.asked <= 2
        laboratory.state["problems"] = ["It fails."]
        laboratory.change()
        for subscriber in (first_page, other):
            assert parts_of(await subscriber.next(SOON_S)) == {"problems": ["It fails."]}
        assert await first_page.next(NOTHING_S) == b""


@on_loop
async def test_slow_page_buffers_each_part_once() -> None:
    laboratory = Laboratory()
    feed = Feed(laboratory.next)
    with feed.subscribe(None) as quick, feed.subscribe(None) as slow:
        await quick.next(SOON_S)
        for number in range(5):
            laboratory.state["problems"] = [str(number)]
            laboratory.change()
            assert parts_of(await quick.next(SOON_S)) == {"problems": [str(number)]}
        missed = parts_of(await slow.next(SOON_S))
        assert missed == laboratory.state
        assert await slow.next(NOTHING_S) == b""


@on_loop
async def test_jobs_are_sent_only_to_their_user() -> None:
    laboratory = Laboratory()
    feed = Feed(laboratory.next)
    with feed.subscribe(None) as anybody:
        await anybody.next(SOON_S)
        # A later subscriber does not wait for a change.
        with feed.subscribe(USER) as ada, feed.subscribe("bob") as bob:
            parts = parts_of(await ada.next(SOON_S))
            if "jobs" not in parts:
                parts = parts_of(await ada.next(SOON_S))
            jobs = parts["jobs"]
            assert isinstance(jobs, list)
            assert {job["id"] for job in jobs} == {RUNNING, WAITING}
            assert not any("user" in job for job in jobs)
            for subscriber in (anybody, bob):
                while events := await subscriber.next(NOTHING_S):
                    assert parts_of(events).get("jobs", []) == []
                    assert RUNNING.encode() not in events


@on_loop
async def test_feed_without_pages_does_not_read_state() -> None:
    laboratory = Laboratory()
    feed = Feed(laboratory.next)
    with feed.subscribe(None) as page:
        await page.next(SOON_S)
    asked = laboratory.asked
    laboratory.change()
    await time_passes_async(NOTHING_S)
    assert laboratory.asked == asked
    # The next page receives the last state at once.
    with feed.subscribe(None) as page:
        assert parts_of(await page.next(SOON_S)) == laboratory.state


@on_loop
async def test_later_page_receives_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_FRESH_S", 0.0)
    laboratory = Laboratory()
    feed = Feed(laboratory.next)
    for _ in range(2):  # the second page opens after the first has closed
        with feed.subscribe(None) as page:
            assert parts_of(await page.next(SOON_S)) == laboratory.state
    with feed.subscribe(None) as page, feed.subscribe(None) as beside:
        await page.next(SOON_S)
        assert parts_of(await beside.next(SOON_S)) == laboratory.state
        with feed.subscribe(USER) as late:  # receives the whole state with the next change
            assert laboratory.state.keys() <= parts_of(await late.next(SOON_S)).keys()


@on_loop
async def test_feed_reports_missing_leader() -> None:
    async def away(seen: str, users: object) -> dict[str, object]:
        raise OperationError(503, "No process of this server leads now.")

    feed = Feed(away)
    with feed.subscribe(None) as page:
        parts = parts_of(await page.next(SOON_S))
        assert parts == {"away": {"detail": "No process of this server leads now."}}
        feed.close()
        assert page.is_closed
        assert await page.next(SOON_S) == b""
    with feed.subscribe(None) as late:
        assert late.is_closed
