"""The source of the schedule: a calendar in a file or at an address, read repeatedly."""

from __future__ import annotations

import asyncio
import logging
import stat
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from ndif.config.units import format_duration
from ndif.schedule import expansion
from ndif.schedule.expansion import CalendarError, Expansion
from ndif.schedule.schedule import Schedule, make_schedule
from ndif.schema.deployment import DeploymentConfig
from ndif.tasks import reap, within

BEHIND = timedelta(days=31)
AHEAD = timedelta(days=400)
"""More than a year, so that yearly events are included."""

_MAX_BYTES = 10_000_000
_TIMEOUT_S = 30.0
_EXPANSION_S = 120.0
"""Wall time of the process: more than `expansion.CPU_S`, because the machine has other work."""
_STALE = timedelta(hours=12)
"""Age at which an unchanged calendar is expanded again, because an expansion ends at a fixed time."""

# httpx logs whole addresses, and the address of a private calendar is its password.
logging.getLogger("httpx").setLevel(logging.WARNING)

Expand = Callable[[bytes, str, datetime, datetime], Awaitable[Expansion]]
"""Expands a calendar's content in a zone, between two times; raises `CalendarError`."""

_SCHEMES = {"http": "http", "https": "https", "webcal": "https", "webcals": "https"}


class _SourceError(Exception):
    """The calendar cannot be fetched; the message says why."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A calendar's content, and a mark of its version: file facts, or headers for the next request."""

    content: bytes
    mark: object


async def expand_in_process(
    content: bytes, zone: str, since: datetime, until: datetime
) -> Expansion:
    """Expand a calendar in a process; raise CalendarError also if that takes too much time or memory."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ndif.schedule.expansion"),
        *(zone, since.isoformat(), until.isoformat()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await within(process.communicate(content), _EXPANSION_S)
    except asyncio.TimeoutError:
        raise CalendarError(
            f"it takes longer than {format_duration(_EXPANSION_S)} to read"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await reap(process)
    if process.returncode:
        raise CalendarError(
            f"reading it takes more than {format_duration(expansion.CPU_S)} of CPU time or "
            f"{expansion.MEMORY_BYTES // 1024**2} MiB of memory"
        )
    return await asyncio.to_thread(Expansion.from_json, output)


class ScheduleSource:
    """The schedule at an address, or the last good one while the calendar cannot be read.

    Fetches the calendar, expands it in a process (`ndif.schedule.expansion`), and makes a schedule from the
    result. The reconciler decides when to refresh, and deploys dedicated models.
    """

    def __init__(
        self,
        address: str,
        deployments: Sequence[DeploymentConfig] = (),
        *,
        zone: str = "UTC",
        timeout_s: float = _TIMEOUT_S,
        expand: Expand = expand_in_process,
    ) -> None:
        """Use `zone` for days and floating times; `expansion.LOCAL` is the machine's own zone."""
        self.deployments = deployments
        """Deployments that complete the settings of events; may be replaced at any time."""
        self.problems: tuple[str, ...] = ()
        """Problems of the last `refresh`, as sentences for an operator, the schedule's own included."""
        self._zone = zone
        self._timeout_s = timeout_s
        self._expand_calendar = expand
        split = urlsplit(address)
        scheme = _SCHEMES.get(split.scheme.lower())
        self._url = split._replace(scheme=scheme).geturl() if scheme else None
        file = unquote(split.path) if split.scheme.lower() == "file" else address
        self._path = Path(file).expanduser()
        self.name = f"{scheme}://{split.hostname}/…" if scheme else str(self._path)
        """The address without its secret part."""
        self._last_good: _Fetched | None = None
        self._last_good_at: datetime | None = None
        self._expansion: Expansion | None = None
        self._expanded_at: datetime | None = None
        self._schedule = Schedule()
        self._completed_by: Sequence[DeploymentConfig] | None = None
        self._lock = asyncio.Lock()

    async def refresh(self, now: datetime) -> Schedule:
        """Return the schedule at the address, or the last good one if it cannot be read; set `problems`."""
        async with self._lock:
            failure = await self._failure(self._renew(now))
            if failure is not None and self._last_good is not None:
                # Renews a stale expansion of the last good calendar; if this fails, the old one stays.
                await self._failure(self._expand(self._last_good, now))
            deployments = self.deployments
            if self._expansion is not None and self._completed_by != deployments:
                schedule = await asyncio.to_thread(make_schedule, self._expansion, deployments)
                self._schedule, self._completed_by = schedule, deployments
            self.problems = self._schedule.problems
            if failure is not None:
                consequence = "no model is dedicated by it"
                if self._last_good_at:
                    consequence = (
                        f"the schedule of {self._last_good_at:%Y-%m-%d %H:%M %Z} still applies"
                    )
                problem = f"The schedule at {self.name} cannot be read ({failure}): {consequence}."
                self.problems = (problem, *self.problems)
            return self._schedule

    async def _renew(self, now: datetime) -> None:
        url = self._url
        fetching = self._download(url) if url else asyncio.to_thread(self._open)
        fetched = await within(fetching, self._timeout_s)
        await self._expand(fetched, now)
        self._last_good, self._last_good_at = fetched, now

    async def _failure(self, work: Awaitable[None]) -> str | None:
        """Await `work`; return the reason if a calendar cannot be fetched or expanded, else None."""
        try:
            await work
        except (_SourceError, CalendarError) as error:
            return str(error)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__} {error}".strip()
        except asyncio.TimeoutError:
            return f"there was no whole answer within {format_duration(self._timeout_s)}"
        except OSError as error:  # no process can be started
            return error.strerror or str(error)
        return None

    async def _expand(self, fetched: _Fetched, now: datetime) -> None:
        """Expand a calendar, unless it is unchanged and its expansion is recent."""
        is_unchanged = self._last_good is not None and self._last_good.content == fetched.content
        if is_unchanged and self._expanded_at is not None and abs(now - self._expanded_at) < _STALE:
            return
        span = now - BEHIND, now + AHEAD
        self._expansion = await self._expand_calendar(fetched.content, self._zone, *span)
        self._expanded_at, self._completed_by = now, None

    def _open(self) -> _Fetched:
        """Return the file's content; the last good object itself if the file has not changed."""
        try:
            facts = self._path.stat()
            mark = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if self._last_good is not None and self._last_good.mark == mark:
                return self._last_good
            if not stat.S_ISREG(facts.st_mode):
                raise _SourceError("it is not a file")
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise _SourceError(error.strerror or str(error)) from error
        return _Fetched(_bounded(content), mark)

    async def _download(self, url: str) -> _Fetched:
        headers = {"Accept": "text/calendar, */*;q=0.1"}
        last_good = self._last_good
        if last_good is not None and isinstance(last_good.mark, dict):
            headers |= last_good.mark
        async with (
            httpx.AsyncClient(timeout=self._timeout_s, follow_redirects=True) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if answer.status_code == httpx.codes.NOT_MODIFIED and last_good is not None:
                return last_good
            if answer.status_code != httpx.codes.OK:
                raise _SourceError(f"HTTP {answer.status_code} {answer.reason_phrase}".strip())
            content = bytearray()
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > _MAX_BYTES:
                    break
        request_names = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}
        mark = {
            request_names[name]: answer.headers[name]
            for name in request_names
            if name in answer.headers
        }
        return _Fetched(_bounded(bytes(content)), mark)


def _bounded(content: bytes) -> bytes:
    if len(content) > _MAX_BYTES:
        raise _SourceError(f"it is larger than {_MAX_BYTES // 1_000_000} MB")
    return content
