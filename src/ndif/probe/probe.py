"""One probe: a process with the real client of a generation, its limits, and the judgement of its value."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ndif.config.units import format_duration
from ndif.host.environment import environment, for_untrusted
from ndif.host.runtimes import Runtime
from ndif.net import is_loopback
from ndif.probe.outcome import Outcome, Question
from ndif.runtime.typed_json import from_json, to_json
from ndif.schema.model_key import ModelKey
from ndif.schema.states import ProbeKind
from ndif.sizes import format_size
from ndif.tasks import end, reap, within

_MODULE = "ndif.probe.trace"
_LONGEST_ANSWER = 1 << 16
_LAST_ERRORS = 4096
"""Bytes of a process's other output that are kept, for the reason of its end."""
_MAX_REASON = 500
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_WAY = (
    *(*_PROXIES, *map(str.upper, _PROXIES)),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""Variables by which clients reach servers on other machines."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model that is probed in one generation."""

    repo_id: str
    revision: str | None
    task: str | None
    generation: str

    @classmethod
    def of(cls, key: ModelKey, generation: str) -> Target:
        """Return the target that a model's key names."""
        return cls(key.repo_id, key.revision, key.task, generation)

    @property
    def label(self) -> str:
        """Return the repository, and the revision behind an `@` where one is named."""
        return self.repo_id + (f"@{self.revision}" if self.revision else "")


async def probe(
    target: Target, runtime: Runtime, url: str, key: str, cache: Path, timeout_s: float
) -> Outcome:
    """Send one trace to the server at `url` and return what came of it.

    `cache` is the client's folder of a model's config and tokenizer. The process is ended, and all that it
    started, after `timeout_s` seconds or when this is cancelled. It unpickles what was made where the model
    ran: it has none of this process's secrets, and reaches no file but the client's own.
    """
    model = target.repo_id, target.revision, target.task
    question = Question(url, key, str(cache), *model, timeout_s)
    process = await asyncio.create_subprocess_exec(
        *(str(runtime.interpreter), "-m", _MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LONGEST_ANSWER,
        env=variables_of_client(runtime, url),
        start_new_session=True,
    )
    try:
        said = await within(_converse(process, question), timeout_s)
    except asyncio.TimeoutError:
        return Outcome(ProbeKind.TIMEOUT, f"No value came within {format_duration(timeout_s)}.")
    finally:
        await _end(process)
    return _outcome(*said)


def variables_of_client(runtime: Runtime, url: str) -> dict[str, str]:
    """Return the environment of a client of the server at `url`, which has none of this process's secrets.

    The way to another machine may lead through a proxy, or to a certificate of one's own.
    """
    known = for_untrusted(environment(runtime))
    if is_loopback(urlsplit(url).hostname or ""):
        return known
    return {**known, **{name: os.environ[name] for name in _WAY if name in os.environ}}


async def _converse(process: asyncio.subprocess.Process, question: Question) -> tuple[bytes, str]:
    """Return the line that answers a question, empty if none comes, and the end of the other output."""
    writer, reader, errors = process.stdin, process.stdout, process.stderr
    if writer is None or reader is None or errors is None:
        raise TypeError("the process has no pipes")
    saying = asyncio.create_task(_last_of(errors), name="errors of a probe")
    try:
        line = b""
        with contextlib.suppress(ConnectionError):  # it has ended
            writer.write(to_json(question) + b"\n")
            await writer.drain()
            line = await reader.readline()
        return line, "" if line else await saying
    except ValueError:
        # It may be at it still, and nobody reads on: its other output need not end.
        return b"", f"its line is longer than {format_size(_LONGEST_ANSWER)}"
    finally:
        await end([saying])


async def _last_of(reader: asyncio.StreamReader) -> str:
    """Read all that comes and return the end of it."""
    last = b""
    while read := await reader.read(_LAST_ERRORS):
        last = (last + read)[-_LAST_ERRORS:]
    return last.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await reap(process)


def _outcome(line: bytes, errors: str) -> Outcome:
    """Return the outcome that a process's answer tells, or that it ended without one."""
    with contextlib.suppress(ValueError):  # it has none
        outcome = from_json(Outcome, line)
        return replace(outcome, reason=outcome.reason[:_MAX_REASON])
    lines = [text for text in map(str.strip, errors.splitlines()) if text]
    why = f": {lines[-1]}" if lines else ""
    return Outcome(ProbeKind.ERROR, f"The client ended without an answer{why}"[:_MAX_REASON])
