"""The behaviour of Redis on which the broker's tests rely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services.process import accepts
from tests.services.redis import RedisServer

pytestmark = pytest.mark.engine


def test_shared_redis_server_answers(redis: RedisServer) -> None:
    assert redis.url == f"redis://127.0.0.1:{redis.port}/0"
    assert redis.command("set", "key", "value") == "OK"
    assert redis.command("getdel", "key") == "value"


@pytest.mark.parametrize("end", [RedisServer.stop, RedisServer.kill])
def test_acknowledged_write_survives_restart(
    tmp_path: Path, end: Callable[[RedisServer], None]
) -> None:
    with RedisServer(tmp_path) as server:
        url = server.url
        assert server.command("set", "key", "value") == "OK"
        end(server)
        assert not accepts(server.port)
        server.start()
        assert server.url == url
        assert server.command("get", "key") == "value"
    assert not accepts(server.port)


def test_redis_server_accepts_options(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "2mb") as server:
        assert server.command("config", "get", "maxmemory") == "maxmemory\n2097152"


def test_paused_redis_server_can_be_stopped(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.pause()
        assert accepts(server.port)
    assert not accepts(server.port)
