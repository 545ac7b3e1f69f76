"""One probe: a process with the real client of a generation, its limits, and the judgement of its value."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ndif.config.units import format_duration
from ndif.host.environment import environment, for_untrusted
from ndif.host.runtimes import Runtime
from ndif.net import is_loopback
from ndif.schema.model_key import ModelKey
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


class Kind(str, Enum):
    """The kinds of outcome, as a metric's label has them."""

    OK = "ok"
    WRONG = "wrong"
    """A value came that cannot be the model's, or is another than before."""
    ERROR = "error"
    """The server refused the trace, or ended it with an error."""
    TIMEOUT = "timeout"
    DOWN = "down"
    """No replica serves, and none is loading, or one has been for too long."""
    LOADING = "loading"
    """The model is being loaded, and serves once it is there."""
    UNSUPPORTED = "unsupported"
    """The model cannot be probed, which says nothing of the server."""


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


@dataclass(frozen=True, slots=True)
class Value:
    """A sample of a value, by which it is compared with those of other probes."""

    shape: tuple[int, ...]
    dtype: str
    tolerance: float
    """Difference that is no difference, as a share of the numbers' spread."""
    numbers: tuple[float, ...]
    tokens: tuple[int, ...]
    """The tokens of the highest scores; empty for a model that predicts none."""

    def differs_from(self, other: Value) -> str | None:
        """Return the sentence that this is another value; None if it is the same but for rounding."""
        if (self.shape, len(self.numbers)) != (other.shape, len(other.numbers)):
            return (
                f"The value has the shape {list(self.shape)}, and had {list(other.shape)} before."
            )
        mean = math.fsum(other.numbers) / max(1, len(other.numbers))
        spread = math.dist(other.numbers, [mean] * len(other.numbers))
        distance = math.dist(self.numbers, other.numbers)
        # A replica on another device may be loaded in another type.
        allowed = max(self.tolerance, other.tolerance)
        if distance <= allowed * max(spread, abs(mean), 1e-9):
            return None
        return (
            f"The value is another than in the first probe of this model: it is {distance:.3g} away, and "
            f"its numbers spread over {spread:.3g}."
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one probe."""

    kind: Kind
    reason: str = ""
    """Sentence that says what is wrong; empty if nothing is."""
    seconds: float | None = None
    """Seconds from sending the trace to its value, its wait in the queue included; None without a value."""
    value: Value | None = None

    @property
    def failed(self) -> bool:
        """Return True if the model is not served as it should be."""
        return self.kind not in (Kind.OK, Kind.LOADING, Kind.UNSUPPORTED)

    def against(self, first: Value | None) -> Outcome:
        """Return this outcome, or a wrong one if its value is another than the first of the model."""
        if first is None or self.value is None:
            return self
        reason = self.value.differs_from(first)
        return (
            self if reason is None else Outcome(Kind.WRONG, reason, self.seconds, value=self.value)
        )

    def describe(self) -> dict[str, Any]:
        """Return the outcome as a JSON-serialisable dict."""
        return {
            "outcome": self.kind.value,
            "reason": self.reason,
            "seconds": self.seconds,
            "value": None if self.value is None else asdict(self.value),
        }


async def probe(
    target: Target, runtime: Runtime, url: str, key: str, cache: Path, timeout_s: float
) -> Outcome:
    """Send one trace to the server at `url` and return what came of it.

    `cache` is the client's folder of a model's config and tokenizer. The process is ended, and all that it
    started, after `timeout_s` seconds or when this is cancelled. It unpickles what was made where the model
    ran: it has none of this process's secrets, and reaches no file but the client's own.
    """
    question = {
        "url": url,
        "key": key,
        "cache": str(cache),
        "repo_id": target.repo_id,
        "revision": target.revision,
        "task": target.task,
        "timeout_s": timeout_s,
    }
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
        return Outcome(Kind.TIMEOUT, f"No value came within {format_duration(timeout_s)}.")
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


async def _converse(
    process: asyncio.subprocess.Process, question: Mapping[str, Any]
) -> tuple[bytes, str]:
    """Return the line that answers a question, empty if none comes, and the end of the other output."""
    writer, reader, errors = process.stdin, process.stdout, process.stderr
    if writer is None or reader is None or errors is None:
        raise TypeError("the process has no pipes")
    saying = asyncio.create_task(_last_of(errors), name="errors of a probe")
    try:
        line = b""
        with contextlib.suppress(ConnectionError):  # it has ended
            writer.write(json.dumps(question).encode() + b"\n")
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
    try:
        answer: dict[str, Any] = json.loads(line)
        kind, reason = Kind(answer["outcome"]), str(answer["reason"])
        return Outcome(kind, reason[:_MAX_REASON], answer.get("seconds"), _value(answer))
    except (ValueError, TypeError, KeyError):
        pass  # it has none
    lines = [text for text in map(str.strip, errors.splitlines()) if text]
    why = f": {lines[-1]}" if lines else ""
    return Outcome(Kind.ERROR, f"The client ended without an answer{why}"[:_MAX_REASON])


def _value(answer: Mapping[str, Any]) -> Value | None:
    if "numbers" not in answer:
        return None
    return Value(
        _tuple(answer["shape"]),
        str(answer["dtype"]),
        float(answer["tolerance"]),
        tuple(map(float, answer["numbers"])),
        _tuple(answer["tokens"]),
    )


def _tuple(numbers: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, numbers))
