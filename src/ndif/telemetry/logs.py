"""The log of a process: lines for people, or JSON objects for programs, by `NDIF_LOG_FORMAT`.

Every process of a server configures its log here, so that a request's id leads to its lines in all
processes. Text that a user's block wrote has at most level DEBUG.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ndif.telemetry.request_id import LOG_FORMAT, TERMINAL_FORMAT, name_requests

if TYPE_CHECKING:
    from rich.console import Console

    from ndif.config.groups import TelemetrySettings

STEPS = "ndif.steps"
"""Logger of one event for each step of a job. It is enabled with JSON, with Loki, and at level DEBUG."""
_VERBOSE_LIBRARIES = ("alembic", "httpx", "httpcore")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_RETRYING = ("ndif.stores", "ndif.queue.callbacks", "ndif.control.publisher")
"""Loggers that log an unavailable service at each attempt, not only when it fails and recovers."""
_REPEATS_S = 10.0
_MAX_REMEMBERED = 256


class OncePerWhile(logging.Filter):
    """A filter that passes a repeated warning about an unavailable service once every 10 seconds.

    Each task that needs the service tries it several times a second; without the filter, these warnings
    would bury the other lines of the log. Equal warnings of different requests count as different. A
    warning with a traceback always passes.
    """

    def __init__(self) -> None:
        """Start without remembered warnings."""
        super().__init__()
        self._logged: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or record.exc_info:
            return True
        if not record.name.startswith(_RETRYING):
            return True
        request_id = vars(record).get("request_id", "")
        key = f"{record.name} {record.msg} {record.args!r}", request_id
        now = time.monotonic()
        if now - self._logged.get(key, -_REPEATS_S) < _REPEATS_S:
            return False
        if len(self._logged) >= _MAX_REMEMBERED:
            self._logged.clear()
        self._logged[key] = now
        return True


def configure(
    process: str,
    settings: TelemetrySettings,
    handlers: Iterable[logging.Handler] | None = None,
    level: int | None = None,
) -> None:
    """Configure this process's log by the settings; `process` names the process in each JSON object.

    `handlers` receive the log; the default is one handler for standard error. A handler without a formatter
    gets the format of the settings. `level` overrides the level of the settings.
    """
    is_json = settings.log_format == "json"
    formatter = _json(process) if is_json else logging.Formatter(LOG_FORMAT)
    chosen: list[logging.Handler] = [*([logging.StreamHandler()] if handlers is None else handlers)]
    for handler in chosen:
        if handler.formatter is None:
            handler.setFormatter(formatter)
    if url := settings.loki_url.get_secret_value():
        chosen.append(_loki(url, process))
    lowest = _LEVELS[settings.log_level] if level is None else level
    # No format uses these fields, and collecting them takes a third of each record's time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=lowest, handlers=chosen, force=True)
    name_requests()
    for handler in chosen:
        handler.addFilter(OncePerWhile())
    has_steps = is_json or bool(url) or lowest <= logging.DEBUG
    logging.getLogger(STEPS).setLevel(logging.INFO if has_steps else logging.WARNING)
    for name in _VERBOSE_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


def for_console(console: Console) -> logging.Handler:
    """Return a handler that writes to a console: in columns if the console is a terminal.

    Readers of a pipe or file need whole lines in the format of the settings, and columns take ten times as
    long to write.
    """
    if not console.is_terminal:
        return logging.StreamHandler(console.file)
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_path=False)
    handler.setFormatter(logging.Formatter(TERMINAL_FORMAT))
    return handler


def _loki(url: str, process: str) -> logging.Handler:
    """Return a handler that sends JSON objects to Loki; import its module only if Loki is configured."""
    from ndif.telemetry.loki import LokiHandler

    handler = LokiHandler(url, process)
    handler.setFormatter(_json(process))
    return handler


def _json(process: str) -> logging.Formatter:
    """Return a formatter of JSON objects; import its library only where it is used."""
    from pythonjsonlogger.core import RESERVED_ATTRS
    from pythonjsonlogger.json import JsonFormatter

    class Json(JsonFormatter):
        """One object a line: time, level, logger, process, message, and the fields of the event."""

        def add_fields(
            self,
            log_data: dict[str, Any],
            record: logging.LogRecord,
            message_dict: dict[str, Any],
        ) -> None:
            """Add the fields of `JsonFormatter`, without `request_id` if it is empty."""
            super().add_fields(log_data, record, message_dict)
            if not log_data.get("request_id"):
                log_data.pop("request_id", None)

    return Json(
        ["levelname", "name", "message"],
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "traceback"},
        static_fields={"process": process, "pid": os.getpid()},
        reserved_attrs=[*RESERVED_ATTRS, "request"],
        timestamp="time",
    )
