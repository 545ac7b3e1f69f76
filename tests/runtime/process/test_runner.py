"""The LOG of a block: lines, and lines that are written again and again."""

from __future__ import annotations

from typing import Any

import pytest

from ndif.runtime.process import runner


class Recorded:
    """Keeps what a channel is given to send."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def send(self, _: dict[str, Any], body: bytes) -> None:
        self.lines.append(body.decode())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_sent_as_they_are(clock: list[float]) -> None:
    channel = Recorded()
    logs = runner._LogStream(channel)  # type: ignore[arg-type]
    logs.write("one\ntwo\n\nth")
    logs.write("ree\nfour\r\nlast")
    assert channel.lines == ["one", "two", "three", "four"]
    logs.finish()
    assert channel.lines[4:] == ["last"]


def test_a_bar_is_sent_from_time_to_time(clock: list[float]) -> None:
    channel = Recorded()
    logs = runner._LogStream(channel)  # type: ignore[arg-type]
    for step in range(1000):
        clock[0] = step / 200
        logs.write(f"\r{step / 10:.1f}%")
    assert channel.lines == ["0.0%", "20.0%", "40.0%", "60.0%", "80.0%"]
    assert len(logs._line) < 10, "it keeps what nobody sees"
    logs.write("\r100.0%\nafter\n")
    assert channel.lines[5:] == ["100.0%", "after"]


def test_what_a_bar_showed_last_is_not_sent_twice(clock: list[float]) -> None:
    channel = Recorded()
    logs = runner._LogStream(channel)  # type: ignore[arg-type]
    logs.write("\rdone")
    logs.write("\n")
    logs.finish()
    assert channel.lines == ["done"]
