"""One probe: a limited child process with the real client of a generation, and its outcome."""

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
from ndif.hostname import is_loopback
from ndif.probe.outcome import ProbeOutcome, Question
from ndif.runtime.typed_json import from_json, to_json
from ndif.schema.model_key import ModelKey
from ndif.schema.states import ProbeKind
from ndif.sizes import format_size
from ndif.tasks import end, reap, within

_MODULE = "ndif.probe.trace"
_MAX_ANSWER_BYTES = 1 << 16
_MAX_ERROR_BYTES = 4096
"""Bytes kept of the end of standard error, to explain why a process ended."""
_MAX_REASON = 500
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_NETWORK_VARIABLES = (
    *(*_PROXIES, *map(str.upper, _PROXIES)),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""Environment variables of proxies and certificates, for servers on other machines."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model and the generation of its probe's client."""

    repo_id: str
    revision: str | None
    task: str | None
    generation: str

    @classmethod
    def of(cls, key: ModelKey, generation: str) -> Target:
        """Return the target of a model key in a generation."""
        return cls(key.repo_id, key.revision, key.task, generation)

    @property
    def label(self) -> str:
        """Return `REPOSITORY`, or `REPOSITORY@REVISION` if there is a revision."""
        return self.repo_id + (f"@{self.revision}" if self.revision else "")


async def probe(
    target: Target, runtime: Runtime, url: str, key: str, cache: Path, timeout_s: float
) -> ProbeOutcome:
    """Send one trace to the server at `url` from a child process, and return the outcome.

    The client keeps the model's config and tokenizer in `cache`. The process group is killed after
    `timeout_s` seconds or on cancellation. The client unpickles data from the machine that ran the model.
    So it gets no secrets of this process and, if the kernel supports that, reaches only its own files.
    """
    model = target.repo_id, target.revision, target.task
    question = Question(url, key, str(cache), *model, timeout_s)
    process = await asyncio.create_subprocess_exec(
        *(str(runtime.interpreter), "-m", _MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_MAX_ANSWER_BYTES,
        env=variables_of_client(runtime, url),
        start_new_session=True,
    )
    try:
        answer = await within(_converse(process, question), timeout_s)
    except asyncio.TimeoutError:
        return ProbeOutcome(
            ProbeKind.TIMEOUT, f"No value came within {format_duration(timeout_s)}."
        )
    finally:
        await _kill_group(process)
    return _outcome(*answer)


def variables_of_client(runtime: Runtime, url: str) -> dict[str, str]:
    """Return the environment of a client of the server at `url`, without secrets of this process.

    A server on another machine may need a proxy, or certificates of a private authority.
    """
    variables = for_untrusted(environment(runtime))
    if is_loopback(urlsplit(url).hostname or ""):
        return variables
    return {
        **variables,
        **{name: os.environ[name] for name in _NETWORK_VARIABLES if name in os.environ},
    }


async def _converse(process: asyncio.subprocess.Process, question: Question) -> tuple[bytes, str]:
    """Send a question; return the answer's line, or an empty one and the end of standard error."""
    writer, reader, errors = process.stdin, process.stdout, process.stderr
    if writer is None or reader is None or errors is None:
        raise TypeError("the process has no pipes")
    reading = asyncio.create_task(_read_tail(errors), name="errors of a probe")
    try:
        line = b""
        with contextlib.suppress(ConnectionError):  # the process has ended
            writer.write(to_json(question) + b"\n")
            await writer.drain()
            line = await reader.readline()
        return line, "" if line else await reading
    except ValueError:
        # The process may still be writing, so its standard error may never end.
        return b"", f"its line is longer than {format_size(_MAX_ANSWER_BYTES)}"
    finally:
        await end([reading])


async def _read_tail(reader: asyncio.StreamReader) -> str:
    last = b""
    while read := await reader.read(_MAX_ERROR_BYTES):
        last = (last + read)[-_MAX_ERROR_BYTES:]
    return last.decode(errors="replace")


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await reap(process)


def _outcome(line: bytes, errors: str) -> ProbeOutcome:
    """Return the outcome in a process's answer, or an ERROR outcome if there is none."""
    with contextlib.suppress(ValueError):  # the line is no outcome
        outcome = from_json(ProbeOutcome, line)
        return replace(outcome, reason=outcome.reason[:_MAX_REASON])
    lines = [text for text in map(str.strip, errors.splitlines()) if text]
    cause = f": {lines[-1]}" if lines else ""
    return ProbeOutcome(ProbeKind.ERROR, f"The client ended without an answer{cause}"[:_MAX_REASON])
