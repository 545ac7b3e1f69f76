"""The LOG messages of a block: lines, and lines that are overwritten repeatedly."""

from __future__ import annotations

from typing import Any

import pytest

from ndif.runtime.process import runner


class Recorded:
    """A channel that records sent lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def send(self, _: dict[str, Any], body: bytes) -> None:
        self.lines.append(body.decode())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    return now


def test_log_lines_are_sent_unchanged(clock: list[float]) -> None:
    channel = Recorded()
    logs = runner._LogStream(channel)  # type: ignore[arg-type]
    logs.write("one\ntwo\n\nth")
    logs.write("ree\nfour\r\nlast")
    assert channel.lines == ["one", "two", "three", "four"]
    logs.finish()
    assert channel.lines[4:] == ["last"]


def test_progress_bar_is_sent_at_intervals(clock: list[float]) -> None:
    channel = Recorded()
    logs = runner._LogStream(channel)  # type: ignore[arg-type]
    for step in range(1000):
        clock[0] = step / 200
        logs.write(f"\r{step / 10:.1f}%")
    assert channel.lines == ["0.0%", "20.0%", "40.0%", "60.0%", "80.0%"]
    assert len(logs._line) < 10, "it keeps what nobody sees"
    logs.write("\r100.0%\nafter\n")
    assert channel.lines[5:] == ["100.0%", "after"]


def test_final_progress_bar_state_is_sent_once(clock: list[float]) -> None:
    channel = Recorded()
    logs = runner._LogStream(channel)  # type: ignore[arg-type]
    logs.write("\rdone")
    logs.write("\n")
    logs.finish()
    assert channel.lines == ["done"]
