"""Messages of commands that wait longer than two seconds."""

from __future__ import annotations

import pytest

from ndif.launch import waiting
from ndif.launch.waiting import waiting_for
from tests.waiting import PATIENCE_S, time_passes, until


def test_only_long_wait_is_reported_and_only_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "_SILENCE_S", 0.05)
    with waiting_for("rain"):
        message = until(lambda: capsys.readouterr().err)
        time_passes(0.2)
    with waiting_for(""):
        time_passes(0.1)
    monkeypatch.setattr(waiting, "_SILENCE_S", PATIENCE_S)
    with waiting_for("snow"):
        pass
    assert message + capsys.readouterr().err == "Waiting for rain …\n"
