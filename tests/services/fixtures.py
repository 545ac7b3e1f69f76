"""Services that tests share: each starts at its first use and ends with the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.swift import SwiftServer


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server that tests share, with its data and state."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server. Each test has its own database; a test that stops the server restarts it."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    """A shared S3 server. Each test has its own bucket; a test that stops the server restarts it."""
    with SwiftServer(tmp_path_factory.mktemp("s3")) as server:
        yield server
