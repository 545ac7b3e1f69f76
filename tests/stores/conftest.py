"""Fixtures for tests of the stores of jobs and accounts."""

from __future__ import annotations

import pytest

from ndif.stores import redis
from ndif.stores.broker.redis import channels
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise Redis's time limits above the tests' patience, since a busy machine may exceed five seconds."""
    for module in (redis, channels):
        monkeypatch.setattr(module, "ANSWER_S", 2 * PATIENCE_S)
    monkeypatch.setitem(redis._OPTIONS, "socket_connect_timeout", 2 * PATIENCE_S)
