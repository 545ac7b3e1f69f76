"""A trace of requests with their users, times and run times: one JSON object a line.

`{"at": 12.5, "model": "org/name", "user": "ada", "run_s": 0.8}`, and optionally `generation`, `weight` and
`priority`. `at` is seconds from any beginning, or an ISO 8601 time; a file uses one of the two.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ndif.errors import NdifError, quoted
from ndif.schema.deployment_settings import parse_model
from ndif.schema.model_key import ModelKey

_GENERATION = re.compile(r"\d+\.\d+", re.ASCII)
_NEWEST = "0.8"
_MOST_PROBLEMS = 10
_LONGEST_LINE = 64 * 1024


class TraceError(NdifError):
    """The trace cannot be replayed; each problem is a sentence that names its line."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at: float
    """Seconds from any beginning; Unix seconds if the trace has dates."""
    model: ModelKey
    user: str
    run_s: float
    generation: str = _NEWEST
    weight: float = 1.0
    priority: bool = False

    def line(self) -> str:
        """Return the request as `read` reads it, without default values."""
        fields: dict[str, Any] = {
            "at": self.at,
            "model": self.model.repo_id,
            "user": self.user,
            "run_s": self.run_s,
        }
        if self.generation != _NEWEST:
            fields["generation"] = self.generation
        if self.weight != 1.0:
            fields["weight"] = self.weight
        if self.priority:
            fields["priority"] = True
        return json.dumps(fields, ensure_ascii=False)


def read_file(path: Path) -> list[TraceRequest]:
    """Read the requests of a file, ordered by time.

    Raises:
        TraceError: if it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            return read(file, str(path))
    except OSError as error:
        raise TraceError([f"{path} cannot be read: {error.strerror}."]) from error
    except UnicodeDecodeError as error:
        raise TraceError([f"{path} is not text in UTF-8."]) from error


def read(lines: Iterable[str], source: str) -> list[TraceRequest]:
    """Read requests from lines of text, ordered by time; errors call the text `source`.

    Raises:
        TraceError: with the first problems.
    """
    requests: list[TraceRequest] = []
    problems: list[str] = []
    models: dict[str, ModelKey] = {}
    first_dated: bool | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request, dated = _request(line, models)
            first_dated = _same_kind(dated, first_dated)
            requests.append(request)
        except _LineError as error:
            problems.append(f"{source}, line {number}: {error}.")
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise TraceError(problems)
    if not requests:
        raise TraceError([f"{source} holds no requests."])
    return sorted(requests, key=lambda request: request.at)


class _LineError(ValueError):
    """A line is malformed; the message says why, without a full stop."""


def _request(line: str, models: dict[str, ModelKey]) -> tuple[TraceRequest, bool]:
    """Return the request of a line, and True if its time is a date; `models` caches parsed names."""
    if len(line) > _LONGEST_LINE:
        raise _LineError(f"it is longer than {_LONGEST_LINE:,} characters")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"this is no JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(fields, dict):
        raise _LineError(f"it must be one request, a JSON object, not {quoted(fields)}")
    for name in sorted(fields.keys() - _FIELDS.keys()):
        raise _LineError(
            f"{quoted(name)} is no field of a request. There are: {', '.join(_FIELDS)}"
        )
    for name in _NEEDED:
        if name not in fields:
            raise _LineError(f'"{name}" is missing')
    dated = isinstance(fields["at"], str)
    values = {name: _FIELDS[name](name, value) for name, value in fields.items()}
    name = values["model"]
    if name not in models:
        try:
            models[name] = parse_model(name)
        except ValueError as error:
            raise _LineError(f'"model": {str(error).removesuffix(".")}') from error
    values["model"] = models[name]
    return TraceRequest(**values), dated


def _same_kind(dated: bool, first_dated: bool | None) -> bool:
    """Return `dated`; raise if it differs from the first line of the file."""
    if first_dated not in (None, dated):
        kind = "an ISO 8601 time" if first_dated else "a number of seconds"
        raise _LineError(f'"at" must be {kind}, as in the lines before')
    return dated


def _at(name: str, value: object) -> float:
    if not isinstance(value, str):
        return _seconds(name, value)
    try:
        # Python 3.10 reads no Z.
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", value.strip()))
    except ValueError as error:
        raise _LineError(
            f'"{name}" must be a number of seconds or an ISO 8601 time, like '
            f"2026-01-31T09:30:00Z, not {quoted(value)}"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _number(value: object) -> float:
    """Return a finite number, or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _seconds(name: str, value: object) -> float:
    number = _number(value)
    if not number >= 0:
        raise _LineError(f'"{name}" must be a number of seconds, at least 0, not {quoted(value)}')
    return number


def _weight(name: str, value: object) -> float:
    number = _number(value)
    if not number > 0:
        raise _LineError(f'"{name}" must be a number above 0, not {quoted(value)}')
    return number


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _LineError(f'"{name}" must be text that is not empty, not {quoted(value)}')
    return value


def _generation(name: str, value: object) -> str:
    if not isinstance(value, str) or not _GENERATION.fullmatch(value):
        raise _LineError(
            f'"{name}" must be a generation of nnsight in quotes, like "0.8", not {quoted(value)}'
        )
    return value


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _LineError(f'"{name}" must be true or false, not {quoted(value)}')
    return value


_FIELDS: Mapping[str, Callable[[str, object], Any]] = {
    "at": _at,
    "model": _text,
    "user": _text,
    "run_s": _seconds,
    "generation": _generation,
    "weight": _weight,
    "priority": _bool,
}
_NEEDED = ("at", "model", "user", "run_s")


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a file of requests.

    Raises:
        TraceError: if it cannot be written.
    """

    def lines() -> Iterator[str]:
        for request in requests:
            yield request.line() + "\n"

    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines())
    except OSError as error:
        raise TraceError([f"{path} cannot be written: {error.strerror}."]) from error
