"""Stand-ins for logging and tqdm, which write to a block's LOG, and for pathlib, which opens nothing.

The real modules open files and sockets, start threads, change other libraries, and look up attributes that
a format names.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from ndif.sandbox.protector import paths

LEVELS = {
    "NOTSET": 0,
    "DEBUG": 10,
    "INFO": 20,
    "WARNING": 30,
    "WARN": 30,
    "ERROR": 40,
    "CRITICAL": 50,
    "FATAL": 50,
}
_NAMES = {number: name for name, number in reversed(LEVELS.items())}
_FILES = ("filename", "stream", "handlers")


class Console:
    """The state that a request's stand-ins share: levels of loggers, and the time of the last bar shown."""

    def __init__(self) -> None:
        self._levels: dict[str, int] = {}
        self.shown_at = 0.0
        self.bar = type("tqdm", (Bar,), {"__module__": "tqdm", "_console": self})
        """The class of the request's bars."""
        self.begin()

    def begin(self) -> None:
        """Reset the levels and times of the last request."""
        self._levels = {"": LEVELS["INFO"]}
        self.shown_at = float("-inf")

    def set_level(self, name: str, level: int | str) -> None:
        """Set a logger's level, by number or name; "" is the root."""
        if isinstance(level, str):
            if level not in LEVELS:
                raise ValueError(f"Unknown level: {level!r}")
            level = LEVELS[level]
        self._levels[name] = int(level)

    def level(self, name: str) -> int:
        """Return the level of a logger, or of its nearest ancestor that has one."""
        while name and not self._levels.get(name):
            name = name.rpartition(".")[0]
        return self._levels.get(name, 0)


class Logger:
    """A logger whose records become lines of the request's LOG."""

    __module__ = "logging"

    def __init__(self, name: str, console: Console) -> None:
        self.name = name
        self.handlers: list[object] = []
        self.propagate = True
        self._console = console

    @property
    def level(self) -> int:
        """The level that holds for this logger."""
        return self._console.level(self.name)

    def setLevel(self, level: int | str) -> None:  # noqa: N802 - the library's name
        """Set the lowest level that is shown, which is INFO by default."""
        self._console.set_level(self.name, level)

    def getEffectiveLevel(self) -> int:  # noqa: N802
        """Return the lowest level that is shown."""
        return self.level

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        """Return True if a record of this level is shown."""
        return level >= self.level

    def getChild(self, suffix: str) -> Logger:  # noqa: N802
        """Return the logger of a name below this one's."""
        return Logger(f"{self.name}.{suffix}" if self.name else suffix, self._console)

    def hasHandlers(self) -> bool:  # noqa: N802
        """Return True, because records always go to the LOG."""
        return True

    def addHandler(self, handler: object) -> None:  # noqa: N802
        """Record a handler without effect: records still go to the LOG."""
        self.handlers.append(handler)

    def removeHandler(self, handler: object) -> None:  # noqa: N802
        """Forget a handler."""
        if handler in self.handlers:
            self.handlers.remove(handler)

    def log(self, level: int, message: object, *arguments: object, **options: object) -> None:
        """Write one record."""
        if not self.isEnabledFor(level):
            return
        text = str(message)
        if arguments:
            argument = arguments[0]
            is_mapping = len(arguments) == 1 and isinstance(argument, Mapping) and argument
            try:
                text %= argument if is_mapping else arguments
            except (TypeError, ValueError, KeyError):
                # Like the library, log the message despite a wrong format.
                text = " ".join(map(str, (text, *arguments)))
        if options.get("exc_info"):
            error = sys.exc_info()[1]
            text += f"\n{type(error).__name__}: {error}" if error is not None else ""
        label = _NAMES.get(level, f"Level {level}")
        print(f"{label} | {self.name or 'root'} | {text}")

    def debug(self, message: object, *arguments: object, **options: object) -> None:
        """Write a record of the level DEBUG, which is not shown by default."""
        self.log(LEVELS["DEBUG"], message, *arguments, **options)

    def info(self, message: object, *arguments: object, **options: object) -> None:
        """Write a record of the level INFO."""
        self.log(LEVELS["INFO"], message, *arguments, **options)

    def warning(self, message: object, *arguments: object, **options: object) -> None:
        """Write a record of the level WARNING."""
        self.log(LEVELS["WARNING"], message, *arguments, **options)

    warn = warning

    def error(self, message: object, *arguments: object, **options: object) -> None:
        """Write a record of the level ERROR."""
        self.log(LEVELS["ERROR"], message, *arguments, **options)

    def exception(self, message: object, *arguments: object, **options: object) -> None:
        """Write a record of the level ERROR, with the error that is being handled."""
        self.log(LEVELS["ERROR"], message, *arguments, **{"exc_info": True, **options})

    def critical(self, message: object, *arguments: object, **options: object) -> None:
        """Write a record of the level CRITICAL."""
        self.log(LEVELS["CRITICAL"], message, *arguments, **options)

    fatal = critical

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        import logging

        return logging.getLogger, (self.name,)


class Handler:
    """A user's handler, formatter or filter, without effect because the LOG has a fixed format."""

    __module__ = "logging"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def _ignore(self, *_: object, **__: object) -> None:
        """Change nothing."""

    setLevel = setFormatter = addFilter = removeFilter = flush = close = _ignore  # noqa: N815


class Bar:
    """A progress bar: an iterable that writes its progress to the LOG from time to time."""

    _interval_s = 1.0
    """Minimum seconds between two lines of a bar, and between lines of short bars."""
    _console: Console

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: object = None,
        total: float | None = None,
        leave: bool = True,
        *_: object,
        initial: float = 0,
        disable: bool | None = False,
        unit: str = "it",
        **__: object,
    ) -> None:
        with contextlib.suppress(TypeError, AttributeError):
            total = len(iterable) if total is None else total  # type: ignore[arg-type]
        self.iterable, self.desc, self.total, self.n = iterable, desc, total, initial
        self.disable, self.leave, self.unit, self.postfix = bool(disable), leave, unit, ""
        self._started = time.monotonic()
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        try:
            # A tensor of several items has no truth value.
            for item in () if self.iterable is None else self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def __len__(self) -> int:
        return int(self.total or 0)

    def __bool__(self) -> bool:
        return self.total is None or self.total > 0

    def __contains__(self, value: object) -> bool:
        return self.iterable is not None and value in self.iterable

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float | None = 1) -> None:
        """Advance by `n`."""
        self.n += 1 if n is None else n
        if time.monotonic() - self._started >= self._interval_s:
            self._show_now_and_then()

    def close(self) -> None:
        """Show the final progress, once."""
        if not self._closed:
            self._closed = True
            if self.leave and time.monotonic() - self._started >= self._interval_s:
                self._show()
            elif self.leave:
                self._show_now_and_then()

    def _show_now_and_then(self) -> None:
        if time.monotonic() - self._console.shown_at >= self._interval_s:
            self._show()

    def _show(self) -> None:
        if self.disable:
            return
        now = self._console.shown_at = time.monotonic()
        of = f"/{self.total:g} ({self.n / self.total:.0%})" if self.total else f" {self.unit}"
        label = f"{self.desc}: " if self.desc else ""
        print(f"{label}{self.n:g}{of}, {now - self._started:.0f} s{self.postfix}")

    def set_description(self, desc: object = None, refresh: bool = True) -> None:
        """Set the text before the numbers."""
        self.desc = desc

    set_description_str = set_description

    def set_postfix(
        self, ordered: Mapping[str, object] | None = None, refresh: bool = True, **values: object
    ) -> None:
        """Set values to show after the numbers."""
        shown = {**(ordered or {}), **values}
        self.postfix = "".join(f", {name}={value}" for name, value in shown.items())

    def set_postfix_str(self, text: object = "", refresh: bool = True) -> None:
        """Set a text to show after the numbers."""
        self.postfix = f", {text}" if text else ""

    def reset(self, total: float | None = None) -> None:
        """Start over."""
        self.n, self._closed, self._started = 0, False, time.monotonic()
        self.total = self.total if total is None else total

    def refresh(self, *_: object, **__: object) -> None:
        """Change nothing: `update` shows the bar."""

    clear = unpause = refresh

    @classmethod
    def write(cls, text: object, *_: object, **__: object) -> None:
        """Write a line of the LOG."""
        print(text)

    @staticmethod
    def get_lock() -> None:
        """Return None: bars share nothing."""


def _logging(console: Console) -> dict[str, Any]:
    def get_logger(name: str | None = None) -> Logger:
        return Logger("" if name in (None, "root") else str(name), console)

    def configure(**options: Any) -> None:
        for name in _FILES:
            if options.get(name) is not None:
                raise AttributeError(
                    f"logging.basicConfig({name}=…) is not available on this server: a block's "
                    "logging goes to its LOG"
                )
        if options.get("level") is not None:
            console.set_level("", options["level"])

    def level_name(level: int | str) -> int | str:
        return LEVELS.get(level, level) if isinstance(level, str) else _NAMES.get(level, level)

    root = get_logger()
    methods = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")
    return {
        **LEVELS,
        **{name: getattr(root, name) for name in methods},
        "getLogger": get_logger,
        "basicConfig": configure,
        "getLevelName": level_name,
        "captureWarnings": lambda _: None,
        "root": root,
        "Logger": Logger,
        **dict.fromkeys(
            ("Handler", "StreamHandler", "NullHandler", "Formatter", "Filter"), Handler
        ),
    }


def _tqdm(console: Console) -> dict[str, Any]:
    def bars(*arguments: int, **options: Any) -> Bar:
        bar: Bar = console.bar(range(*arguments), **options)
        return bar

    return {
        **dict.fromkeys(("tqdm", "tqdm_asyncio", "tqdm_notebook"), console.bar),
        **dict.fromkeys(("trange", "tarange", "tnrange"), bars),
    }


_CONTENTS: dict[str, Callable[[Console], dict[str, Any]]] = {
    "logging": _logging,
    "pathlib": lambda _: paths.CLASSES,
    **dict.fromkeys(
        ("tqdm", "tqdm.auto", "tqdm.std", "tqdm.asyncio", "tqdm.notebook", "tqdm.autonotebook"),
        _tqdm,
    ),
}

NAMES = frozenset(_CONTENTS)
"""Modules that have a stand-in."""


def contents(name: str, console: Console) -> dict[str, Any]:
    """Return the attributes of a stand-in, named so that a result refers to the user's originals."""
    attributes = _CONTENTS[name](console)
    for key, value in attributes.items():
        if isinstance(value, FunctionType) and value.__module__ == __name__:
            value.__module__, value.__qualname__ = name, key
    return attributes
