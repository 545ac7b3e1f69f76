"""Durations on the command line, written like settings: "15m", or a number of seconds."""

from __future__ import annotations

from typing import Any

import click

from ndif.config.units import format_duration, read_duration


class DurationParam(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """The type of an option whose value is a duration in seconds."""

    name = "duration"

    def __init__(self, at_least: float = 0.0, *, is_open: bool = False) -> None:
        """Accept durations of at least `at_least` seconds; with `is_open`, only longer ones."""
        self._at_least = at_least
        self._is_open = is_open

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = read_duration(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)
        is_short = seconds <= self._at_least if self._is_open else seconds < self._at_least
        if is_short:
            bound = "more than" if self._is_open else "at least"
            self.fail(f"{value!r} must be {bound} {format_duration(self._at_least)}", param, ctx)
        return seconds
