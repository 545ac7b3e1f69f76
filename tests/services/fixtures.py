"""Services that tests share: each is started when it is first asked for, and ended with the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.swift import SwiftServer


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server. What a test leaves in it, or does to it, the next one finds."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server. Each test has a database of its own; who stops the server starts it again."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    """An S3 server. Tests share it, each with a bucket of its own; who stops it starts it again."""
    with SwiftServer(tmp_path_factory.mktemp("s3")) as server:
        yield server
