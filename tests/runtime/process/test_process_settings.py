"""Settings of a process: what Python and torch remember of one request is forgotten before the next."""

from __future__ import annotations

import warnings

import pytest

from ndif.runtime.process.process_settings import forget_warnings


@pytest.mark.parametrize("action", ["default", "module", "once"])
def test_a_warning_that_was_shown_is_shown_again(action: str) -> None:
    shown: list[str] = []

    def warn() -> None:
        warnings.warn("cut short", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter(action)  # type: ignore[arg-type]
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        warn()
        warn()
        assert shown == ["cut short"]
        filters = [*warnings.filters]
        forget_warnings()
        assert [*warnings.filters] == filters
        warn()
    assert shown == ["cut short"] * 2
