"""The live state of the open pages of this process, which share one request and receive changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from ndif.schema.answer import to_plain
from ndif.schema.deployment import OperationError
from ndif.schema.job_state import OwnJob
from ndif.schema.public_state import NextState, PublicState
from ndif.stores.broker import BrokerError
from ndif.tasks import end, within

logger = logging.getLogger(__name__)

Next = Callable[[str, Sequence[str]], Awaitable[NextState]]
"""Takes the name of the last state, and user names; returns the next state and the users' jobs.

See `ndif.control.leader.Leader.next_state`.
"""

JOBS, AWAY = "jobs", "away"
"""Names of further events: the viewer's jobs, and the reason why the state is unavailable."""
_RETRY_S = 5.0
_FRESH_S = 10.0
"""Maximum age of the last state that a new page gets while it waits for the next one, in seconds."""
_NO_STATE = "The server failed to describe its state; its log says why."


class Subscriber:
    """One open page and its unsent events: the latest event of each name.

    A page that reads slowly skips states; at most one event of each name waits. A page never gets the same
    event twice in a row.
    """

    def __init__(self, user: str | None) -> None:
        self.user = user
        self.is_closed = False
        self._waiting: dict[str, bytes] = {}
        self._last: dict[str, bytes] = {}
        """The latest event of each name, unsent or sent."""
        self._arrived = asyncio.Event()

    def put(self, name: str, event: bytes) -> None:
        """Queue an event in place of an unsent one of the same name, unless it repeats the last one."""
        if self._last.get(name) != event:
            self._last[name] = self._waiting[name] = event
            self._arrived.set()

    def put_unavailable(self, event: bytes) -> None:
        """Queue the event that the state is unavailable; the next state is sent completely."""
        self._last.clear()
        self.put(AWAY, event)

    def close(self) -> None:
        """End the page's stream."""
        self.is_closed = True
        self._arrived.set()

    async def next(self, within_s: float) -> bytes:
        """Return the unsent events; without events, wait up to `within_s` or until the stream closes."""
        if not self._waiting and not self.is_closed:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._arrived.wait(), within_s)
        self._arrived.clear()
        content, self._waiting = b"".join(self._waiting.values()), {}
        return content


class Feed:
    """Requests the state while pages are open, and sends the changed parts to every page.

    A part is serialised once for all pages. The jobs of a user go only to the pages of that user.
    """

    def __init__(self, next_state: Next) -> None:
        self._next = next_state
        self._subscribers: set[Subscriber] = set()
        self._parts: dict[str, bytes] = {}
        self._jobs: dict[str, bytes] = {}
        self._taken_at = float("-inf")
        self._users_changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._is_closed = False

    @contextlib.contextmanager
    def subscribe(self, user: str | None) -> Iterator[Subscriber]:
        """Yield a subscriber that gets the whole state first, then the changes."""
        subscriber = Subscriber(user)
        if self._is_closed:
            subscriber.close()
        elif asyncio.get_running_loop().time() - self._taken_at < _FRESH_S:
            for name, event in self._parts.items():
                subscriber.put(name, event)
        if user is not None and user in self._jobs:
            subscriber.put(JOBS, self._jobs[user])
        self._subscribers.add(subscriber)
        if user is not None:
            self._users_changed.set()
        if self._following is None:
            self._following = asyncio.create_task(self._follow_state(), name="dashboard")
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)
            if not self._subscribers:
                self._following.cancel()
                self._following = None

    async def state(self) -> PublicState:
        """Return the current state."""
        state = (await self._next("", ())).state
        if state is None:  # None means that the named state is unchanged, but "" names no state
            raise RuntimeError(_NO_STATE)
        return state

    def close(self) -> None:
        """End every stream, also of later pages, because the server stops."""
        self._is_closed = True
        for subscriber in self._subscribers:
            subscriber.close()

    async def _follow_state(self) -> None:
        last_name = ""
        while True:
            users = sorted(
                {subscriber.user for subscriber in self._subscribers if subscriber.user is not None}
            )
            self._users_changed.clear()
            call = asyncio.ensure_future(self._next(last_name, users))
            changed = asyncio.ensure_future(self._users_changed.wait())
            try:
                await asyncio.wait({call, changed}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    continue  # a user's page has opened: repeat the request with that user
                answer = call.result()
            except (OperationError, BrokerError) as error:
                last_name = await self._report_unavailable(str(error))
            except Exception:
                logger.exception("the state for the dashboard could not be read")
                last_name = await self._report_unavailable(_NO_STATE)
            else:
                last_name = answer.name
                self._taken_at = asyncio.get_running_loop().time()
                if answer.state is not None:
                    self._store(answer.state, answer.jobs, users)
                self._send()
            finally:
                await end([call, changed])

    def _store(
        self,
        state: PublicState,
        jobs: Mapping[str, Sequence[OwnJob]],
        users: Sequence[str],
    ) -> None:
        for name, part in to_plain(state).items():
            event = event_of(name, part)
            if self._parts.get(name) != event:
                self._parts[name] = event
        self._jobs = {user: event_of(JOBS, [*map(to_plain, jobs.get(user, ()))]) for user in users}

    def _send(self) -> None:
        """Send every page the parts that it lacks; a newly opened page lacks all parts."""
        for subscriber in self._subscribers:
            for name, event in self._parts.items():
                subscriber.put(name, event)
            own_jobs = self._jobs.get(subscriber.user or "")
            if own_jobs is not None:
                subscriber.put(JOBS, own_jobs)

    async def _report_unavailable(self, sentence: str) -> str:
        """Send `sentence` to the pages, wait before the next attempt, and return the empty name."""
        for subscriber in self._subscribers:
            subscriber.put_unavailable(event_of(AWAY, {"detail": sentence}))
        self._parts, self._jobs = {}, {}
        await asyncio.sleep(_RETRY_S)
        return ""


def event_of(name: str, value: Any) -> bytes:
    """Return a server-sent event whose data is `value` as JSON."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
