"""Settings of a process: Python and torch forget the state of one request before the next."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from ndif.runtime.process.process_settings import ProcessSettings, forget_warnings


@pytest.mark.parametrize("action", ["default", "module", "once"])
def test_forgotten_warning_is_shown_again(action: str) -> None:
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


def test_thread_count_set_by_another_thread_is_restored() -> None:
    before = torch.get_num_threads()
    settings = ProcessSettings()
    counts: list[int] = []

    def in_a_thread(work: object) -> None:
        thread = threading.Thread(target=work)  # type: ignore[arg-type]
        thread.start()
        thread.join()

    in_a_thread(lambda: torch.set_num_threads(before + 1))
    assert torch.get_num_threads() == before
    assert settings.restore() is None
    in_a_thread(lambda: counts.append(torch.get_num_threads()))
    assert counts == [before]
