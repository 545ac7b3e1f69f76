"""Commands that wait say for what, once it takes longer than two seconds."""

from __future__ import annotations

import time

import pytest

from ndif.launch import waiting
from ndif.launch.waiting import waiting_for


def test_a_long_wait_is_told_once_and_a_short_one_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "_SILENCE_S", 0.05)
    with waiting_for("rain"):
        time.sleep(0.3)
    with waiting_for("snow"):
        pass
    with waiting_for(""):
        time.sleep(0.1)
    assert capsys.readouterr().err == "Waiting for rain …\n"
