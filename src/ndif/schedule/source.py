"""Where the schedule comes from: a file or an address, looked at again and again."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from ndif.cluster.calendar.content import CalendarError
from ndif.cluster.schedule import Schedule, read
from ndif.schema.deployment import DeploymentConfig
from ndif.tasks import within

_MAX_BYTES = 10_000_000
_TIMEOUT_S = 30.0
_STALE = timedelta(hours=12)
"""A schedule reaches only so far, so an unchanged calendar is read again, too."""

# It would log the whole of an address, and that of a private calendar is its password.
logging.getLogger("httpx").setLevel(logging.WARNING)

_SCHEMES = {"http": "http", "https": "https", "webcal": "https", "webcals": "https"}


class _SourceError(Exception):
    """The calendar cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A calendar's text, and what tells whether there is a newer one."""

    text: str
    mark: object


class ScheduleSource:
    """The schedule at an address, and the last good one while that cannot be read."""

    def __init__(
        self,
        address: str,
        deployments: Sequence[DeploymentConfig] = (),
        *,
        zone: tzinfo = timezone.utc,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.deployments = deployments
        """What events need not say of models that the server knows; may be replaced."""
        self.problems: tuple[str, ...] = ()
        """What an operator should know since the last `refresh`, the schedule's own included."""
        self._zone = zone
        self._timeout_s = timeout_s
        split = urlsplit(address)
        scheme = _SCHEMES.get(split.scheme.lower())
        self._url = split._replace(scheme=scheme).geturl() if scheme else None
        file = unquote(split.path) if split.scheme.lower() == "file" else address
        self._path = Path(file).expanduser()
        # No more of an address is told: see above.
        self.name = f"{scheme}://{split.hostname}/…" if scheme else str(self._path)
        """What may be told of the address."""
        self._schedule = Schedule()
        self._good: _Fetched | None = None
        self._good_at: datetime | None = None
        self._read_as: tuple[datetime, Sequence[DeploymentConfig]] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def refresh(self, now: datetime) -> Schedule:
        """The schedule as it is at the address now, or the last good one; never an error."""
        async with self._one_at_a_time:
            failure: str | None = None
            fetched = self._good
            try:
                fetched = await within(self._fetch(), self._timeout_s)
                await self._read(fetched, now)
                self._good, self._good_at = fetched, now
            except (_SourceError, CalendarError) as error:
                failure = str(error)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                failure = f"{type(error).__name__} {error}".strip()
            except asyncio.TimeoutError:
                failure = f"there was no whole answer within {self._timeout_s:g} s"
            if failure is not None and self._good is not None:
                await self._read(self._good, now)
            self.problems = (*self._failed(failure), *self._schedule.problems)
            return self._schedule

    def _failed(self, failure: str | None) -> tuple[str, ...]:
        if failure is None:
            return ()
        held = (
            f"that of {self._good_at:%Y-%m-%d %H:%M %Z} still holds"
            if self._good_at
            else "no model is dedicated by it"
        )
        return (f"The schedule at {self.name} cannot be read ({failure}): {held}.",)

    async def _read(self, fetched: _Fetched, now: datetime) -> None:
        """Make the schedule of a text, unless it is the one there is and reaches far enough."""
        deployments = self.deployments
        if self._good and self._good.text == fetched.text and self._read_as:
            at, known = self._read_as
            if known == deployments and abs(now - at) < _STALE:
                return
        self._schedule = await asyncio.to_thread(
            read, fetched.text, deployments, now=now, zone=self._zone
        )
        self._read_as = (now, deployments)

    async def _fetch(self) -> _Fetched:
        """What is at the address; the last good text itself where that has not changed."""
        if self._url is not None:
            return await self._download(self._url)
        return await asyncio.to_thread(self._open)

    def _open(self) -> _Fetched:
        try:
            facts = self._path.stat()
            mark = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if self._good is not None and self._good.mark == mark:
                return self._good
            if not stat.S_ISREG(facts.st_mode):
                raise _SourceError("it is not a file")
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise _SourceError(error.strerror or str(error)) from error
        return _Fetched(_text(content), mark)

    async def _download(self, url: str) -> _Fetched:
        headers = {"Accept": "text/calendar, */*;q=0.1"}
        good = self._good
        if good is not None and isinstance(good.mark, dict):
            headers.update(good.mark)
        async with (
            httpx.AsyncClient(timeout=self._timeout_s, follow_redirects=True) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if answer.status_code == httpx.codes.NOT_MODIFIED and good is not None:
                return good
            if answer.status_code != httpx.codes.OK:
                raise _SourceError(f"HTTP {answer.status_code} {answer.reason_phrase}".strip())
            content = bytearray()
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > _MAX_BYTES:
                    break
        asked = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}
        mark = {asked[name]: answer.headers[name] for name in asked if name in answer.headers}
        return _Fetched(_text(bytes(content)), mark)


def _text(content: bytes) -> str:
    if len(content) > _MAX_BYTES:
        raise _SourceError(f"it is larger than {_MAX_BYTES // 1_000_000} MB")
    # What is broken in one event's text is no reason to lose the others.
    return content.decode("utf-8-sig", errors="replace")
