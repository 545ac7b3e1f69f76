"""The log of a process, in both formats, read by another process."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from ndif.telemetry.logs import OncePerWhile, for_console

pytestmark = pytest.mark.process

PROGRAM = """
import logging, sys
from ndif.config.settings import Settings
from ndif.telemetry import logs
from ndif.telemetry.request_id import RequestId, naming
logs.configure("gateway", Settings())
log = logging.getLogger("ndif.example")
log.debug("fine print")
log.info("one\\ntwo %s", "\\u2603", extra={"job": "j", "duration_s": 0.5})
with naming(RequestId(["abc"])):
    log.warning("named")
try:
    raise ValueError("wrong")
except ValueError:
    log.exception("it failed")
logging.getLogger("httpx").info("GET http://secret")
logging.getLogger("alembic.runtime").info("a plug-in")
logging.getLogger(logs.STEPS).info("a step")
"""


def logged(**settings: str) -> list[str]:
    """Return the lines of the program's standard error."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"NDIF_" + name.upper(): value for name, value in settings.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stderr.splitlines()


def objects(**settings: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in logged(log_format="json", **settings)]


def test_json_log_writes_one_object_per_line() -> None:
    first, named, failed, step = objects()
    assert first.pop("pid") > 0
    moment = first.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00", moment)
    assert first == {
        "level": "INFO",
        "logger": "ndif.example",
        "process": "gateway",
        "message": "one\ntwo ☃",
        "job": "j",
        "duration_s": 0.5,
    }
    assert (named["message"], named["request_id"]) == ("named", "abc")
    assert failed["message"] == "it failed"
    assert failed["traceback"].startswith("Traceback")
    assert failed["traceback"].endswith("ValueError: wrong")
    assert step["logger"] == "ndif.steps"


def test_text_log_writes_readable_lines() -> None:
    lines = logged()
    assert re.fullmatch(r"[-\d]+ [:,\d]+ INFO ndif\.example: one", lines[0])
    assert re.fullmatch(r"[-\d]+ [:,\d]+ WARNING ndif\.example \[abc\]: named", lines[2])
    assert not any("a step" in line for line in lines)


@pytest.mark.parametrize(
    ("level", "messages"),
    [
        ("debug", ["fine print", "one\ntwo ☃", "named", "it failed", "a step"]),
        ("warning", ["named", "it failed"]),
    ],
)
def test_events_below_log_level_are_omitted(level: str, messages: list[str]) -> None:
    info_messages = [line["message"] for line in objects(log_level=level)]
    # Steps are additional events of the JSON format.
    assert [
        message for message in info_messages if message != "a step" or level == "debug"
    ] == messages


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_are_wrapped_only_in_terminal(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=40, color_system=None)
    handler = for_console(console)
    long = "word " * 20
    handler.handle(logging.makeLogRecord({"msg": long, "request": ""}))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert (len(lines) > 1) == is_terminal
    assert (lines == [long]) != is_terminal


def test_repeated_warning_is_logged_once_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Repeated warnings about an unavailable service do not displace other messages."""
    now = 100.0
    monkeypatch.setattr("ndif.telemetry.logs.time.monotonic", lambda: now)
    once = OncePerWhile()

    def is_logged(text: str, *, level: int = logging.WARNING, **fields: Any) -> bool:
        named, failed = fields.pop("logger", "ndif.stores.redis"), fields.pop("exc", None)
        record = logging.LogRecord(named, level, "f", 1, "%s is away", (text,), failed)
        vars(record).update(fields)
        return once.filter(record)

    assert is_logged("a")
    assert is_logged("b")
    assert not is_logged("a")
    assert is_logged("a", request_id="other")
    for level in (logging.INFO, logging.ERROR):
        assert is_logged("a", level=level)
        assert is_logged("a", level=level)
    for _ in range(2):  # the shipper logs only changes
        assert is_logged("a", logger="ndif.telemetry.shipper")
    error = ValueError("x")
    assert is_logged("a", exc=(ValueError, error, None))
    now += 9.9
    assert not is_logged("a")
    now += 0.2
    assert is_logged("a")
    assert not is_logged("a")
    for count in range(1000):  # the filter's memory is bounded
        assert is_logged(f"of {count}")
    assert len(once._logged) <= 256
