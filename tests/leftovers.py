"""A pytest plugin that checks that each module of tests restores its process's settings.

The plugin compares the settings that a reset between two requests restores. A module that leaves one
changed fails in its last test.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

_EXPECTED = {
    "environment": "libraries and session fixtures set variables",
    "loggers": "libraries make them as they are imported",
    "warnings": "pytest sets filters for each test",
    "event loop": "there is one in each test of coroutines",
    "signal handlers": "pytest-timeout sets its own",
    "garbage collection": "a fork server of the tests freezes it",
    "gc.callbacks": "hypothesis has one",
    "excepthook": "pytest sets its own for each test",
    "unraisablehook": "pytest sets its own for each test",
    "showwarning": "pytest records warnings of each test",
}
"""Settings that change without a test's fault, and the reason."""


def _logging() -> tuple[int, int, list[str]]:
    """Return the root's level, the level disabled everywhere, and ndif's loggers with changed settings."""
    loggers = [*logging.root.manager.loggerDict.items()]
    return (
        logging.root.level,
        logging.root.manager.disable,
        sorted(
            name
            for name, logger in loggers
            if name.startswith("ndif")
            and isinstance(logger, logging.Logger)
            and (logger.disabled or not logger.propagate or logger.level > logging.WARNING)
        ),
    )


def _readers() -> dict[str, Callable[[], Any]]:
    if "torch" not in sys.modules:
        return {"logging": _logging}
    from ndif.runtime.process.process_settings import settings

    readers = {
        setting.name: setting.read for setting in settings() if setting.name not in _EXPECTED
    }
    return {**readers, "logging": _logging}


def _read() -> dict[str, Any]:
    """Return the values of the settings that can be read."""
    values = {}
    for name, read in _readers().items():
        with contextlib.suppress(Exception):
            values[name] = read()
    if "sys.path" in values:
        # Ray adds the working directory once more, with the first connection of a process.
        values["sys.path"] = {*sys.path} - {str(Path.cwd())}
    return values


_before: dict[str, Any] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    if not _before:
        _before.update(_read())
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    result = yield
    if not _before or (nextitem is not None and nextitem.path == item.path):
        return result
    now = _read()
    changed = {
        name: (_before[name], now[name]) for name in _before if now.get(name) != _before[name]
    }
    _before.clear()
    if changed:
        pytest.fail(f"{item.path.name} leaves in its process: {changed}", pytrace=False)
    return result
