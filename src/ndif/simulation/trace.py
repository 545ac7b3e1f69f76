"""A trace of requests with their users, times and run times, as a file with one JSON object per line.

A line is `{"at": 12.5, "model": "org/name", "user": "ada", "run_s": 0.8}`, optionally with `generation`,
`weight` and `priority`. `at` is a number of seconds from any beginning, or an ISO 8601 time; a file uses
only one of the two.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ndif.errors import NdifError, quoted
from ndif.schema.deployment_settings import parse_model
from ndif.schema.model_key import ModelKey

_NEWEST = "0.8"
_MOST_PROBLEMS = 10
_LONGEST_LINE = 64 * 1024


class TraceError(NdifError):
    """The trace cannot be replayed; each line of the message is a problem with its location."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at: float
    """Seconds from any beginning; Unix time if the trace has dates."""
    model: ModelKey
    user: str
    run_s: float
    generation: str = _NEWEST
    weight: float = 1.0
    priority: bool = False

    def line(self) -> str:
        """Return the request as a line that `read` parses, without default values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = {name: value for name, value in fields.items() if value != _DEFAULTS.get(name)}
        return json.dumps({**given, "model": self.model.repo_id}, ensure_ascii=False)


def _text(pattern: str) -> Callable[[object], bool]:
    matches = re.compile(pattern, re.ASCII | re.DOTALL).fullmatch
    return lambda value: isinstance(value, str) and matches(value) is not None


def _number(value: object) -> float:
    """Return a finite number, or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


_SECONDS = (lambda value: _number(value) >= 0, "a number of seconds, at least 0")
_TEXT = (_text(".+"), "text that is not empty")
_FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "at": (lambda value: isinstance(value, str) or _number(value) >= 0, _SECONDS[1]),
    "model": _TEXT,
    "user": _TEXT,
    "run_s": _SECONDS,
    "generation": (_text(r"\d+\.\d+"), 'a generation of nnsight in quotes, like "0.8"'),
    "weight": (lambda value: _number(value) > 0, "a number above 0"),
    "priority": (lambda value: isinstance(value, bool), "true or false"),
}
"""A check and a description of valid values, by field."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TraceRequest)}
_NEEDED = [name for name, default in _DEFAULTS.items() if default is dataclasses.MISSING]


def read_file(path: Path) -> list[TraceRequest]:
    """Read the requests of a file, ordered by time."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return read(file, str(path))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text in UTF-8.") from error


def read(lines: Iterable[str], source: str) -> list[TraceRequest]:
    """Read requests from lines of text, ordered by time; `source` names the text in errors."""
    requests: list[TraceRequest] = []
    problems: list[str] = []
    models: dict[str, ModelKey] = {}
    first_dated: bool | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request, first_dated = _request(line, models, first_dated)
            requests.append(request)
        except _LineError as error:
            problems.append(f"{source}, line {number}: {error}.")
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise TraceError("\n".join(problems))
    if not requests:
        raise TraceError(f"{source} contains no requests.")
    return sorted(requests, key=lambda request: request.at)


class _LineError(ValueError):
    """A line is invalid; the message is the reason, without a full stop."""


def _request(
    line: str, models: dict[str, ModelKey], first_dated: bool | None
) -> tuple[TraceRequest, bool]:
    """Return the request of a line, and True if its time is a date, as in either all lines or none.

    `models` caches parsed names.
    """
    if len(line) > _LONGEST_LINE:
        raise _LineError(f"the line is longer than {_LONGEST_LINE:,} characters")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"this is not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(fields, dict):
        raise _LineError(f"a request must be a JSON object, not {quoted(fields)}")
    for name in sorted(fields.keys() - _FIELDS.keys()):
        raise _LineError(
            f"{quoted(name)} is not a field of a request. Fields are: {', '.join(_FIELDS)}"
        )
    for name in _NEEDED:
        if name not in fields:
            raise _LineError(f'"{name}" is missing')
    for name, value in fields.items():
        is_valid, kind = _FIELDS[name]
        if not is_valid(value):
            raise _LineError(f'"{name}" must be {kind}, not {quoted(value)}')
    dated = isinstance(fields["at"], str)
    if dated:
        fields["at"] = _unix_seconds(fields["at"])
    if first_dated not in (None, dated):
        kind = "an ISO 8601 time" if first_dated else "a number of seconds"
        raise _LineError(f'"at" must be {kind}, as in the lines before')
    name = fields["model"]
    if name not in models:
        try:
            models[name] = parse_model(name)
        except ValueError as error:
            raise _LineError(f'"model": {str(error).removesuffix(".")}') from error
    return TraceRequest(**{**fields, "model": models[name]}), dated


def _unix_seconds(text: str) -> float:
    try:
        # Python 3.10 does not parse Z.
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip()))
    except ValueError as error:
        raise _LineError(
            '"at" must be a number of seconds or an ISO 8601 time, like 2026-01-31T09:30:00Z, '
            f"not {quoted(text)}"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a file of requests."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{request.line()}\n" for request in requests)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}.") from error
