"""Settings of a process: what Python and torch remember of one request is forgotten before the next."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from ndif.runtime.process.process_settings import ProcessSettings, forget_warnings


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


def test_the_number_of_threads_that_another_thread_has_set_is_restored() -> None:
    before = torch.get_num_threads()
    settings = ProcessSettings()
    found: list[int] = []

    def in_a_thread(work: object) -> None:
        thread = threading.Thread(target=work)  # type: ignore[arg-type]
        thread.start()
        thread.join()

    in_a_thread(lambda: torch.set_num_threads(before + 1))
    assert torch.get_num_threads() == before
    assert settings.restore() is None
    in_a_thread(lambda: found.append(torch.get_num_threads()))
    assert found == [before]
