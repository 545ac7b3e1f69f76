"""The log of a process: lines for people, or JSON objects for programs, by `NDIF_LOG_FORMAT`.

Every process of a server is set up here, so that one request can be followed through all of them by
its id. Text that a user's block wrote is of level DEBUG at the most.
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
"""Logger of one event for each step of a job: in JSON, for Loki, and in lines of level DEBUG."""
_VERBOSE_LIBRARIES = ("alembic", "httpx", "httpcore")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_RETRYING = ("ndif.stores", "ndif.queue.callbacks", "ndif.control.publisher")
"""Loggers that are told of a service at each try, and not when it goes and when it comes back."""
_REPEATS_S = 10.0
_MAX_REMEMBERED = 256


class OncePerWhile(logging.Filter):
    """A filter of warnings of a service that is away: one that repeats is logged every 10 seconds.

    Each task that needs the service tries it several times a second; their lines would push out of
    sight what the log says besides. Warnings of different requests are different, and those with a
    traceback are all logged.
    """

    def __init__(self) -> None:
        """Remember no warnings yet."""
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
    """Set this process's log up as the settings say; `process` is its name in each JSON object.

    `handlers` receive it, those without a format of their own in the one of the settings; by default
    standard error, which whoever started the process keeps. `level` replaces that of the settings.
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
    # No line names them, and to find them takes a third of each record's time.
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
    """Return a handler that writes to a console, in columns where it is a terminal.

    What reads a pipe or a file instead wants whole lines in the format of the settings, and columns take
    ten times as long to write.
    """
    if not console.is_terminal:
        return logging.StreamHandler(console.file)
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_path=False)
    handler.setFormatter(logging.Formatter(TERMINAL_FORMAT))
    return handler


def _loki(url: str, process: str) -> logging.Handler:
    """Return the handler that sends JSON objects to Loki; it is imported where there is one."""
    from ndif.telemetry.loki import LokiHandler

    handler = LokiHandler(url, process)
    handler.setFormatter(_json(process))
    return handler


def _json(process: str) -> logging.Formatter:
    """Return a formatter of JSON objects; it is imported where it is wanted alone."""
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
            """See `JsonFormatter`. Fields that a record lacks are left out."""
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
