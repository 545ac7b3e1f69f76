"""Databases for tests of accounts: a SQLite file, and a database of a PostgreSQL server."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ENGINES = ("sqlite", "postgres")

FOREIGN = """
CREATE TABLE users (user_id VARCHAR(64) PRIMARY KEY, email VARCHAR(200));
CREATE TABLE keys (key_id VARCHAR(64) PRIMARY KEY, user_id VARCHAR(64) REFERENCES users(user_id));
CREATE TABLE tiers (tier_id VARCHAR(64) PRIMARY KEY, name VARCHAR(200));
CREATE TABLE key_tier_assignments (key_id VARCHAR(64), tier_id VARCHAR(64), PRIMARY KEY (key_id, tier_id));
INSERT INTO users VALUES ('u1', 'ada@example.org');
INSERT INTO keys VALUES ('11111111-aaaa', 'u1'), ('22222222-bbbb', NULL), ('33333333-cccc', 'u1');
INSERT INTO tiers VALUES ('t1', 'tier_hotswap'), ('t2', 'trusted-partner');
INSERT INTO key_tier_assignments VALUES ('11111111-aaaa', 't1'), ('33333333-cccc', 't2');
"""
"""Tables of another NDIF server; some servers have no `users` table."""
WITHOUT_USERS = """
CREATE TABLE keys (key_id VARCHAR(64) PRIMARY KEY);
CREATE TABLE tiers (tier_id INTEGER PRIMARY KEY, name VARCHAR(200));
CREATE TABLE key_tier_assignments (key_id VARCHAR(64), tier_id INTEGER);
INSERT INTO keys VALUES ('44444444-dddd');
INSERT INTO tiers VALUES (7, 'hotswapping');
INSERT INTO key_tier_assignments VALUES ('44444444-dddd', 7);
"""


@dataclass(frozen=True)
class TestDatabase:
    """A database URL, and access to the database that bypasses the code under test."""

    __test__ = False

    url: str
    sql: Callable[[str], Sequence[str]]
    """Run statements; return the lines of the answer, with | between columns."""


@pytest.fixture(params=ENGINES)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> TestDatabase:
    """An empty database of each engine."""
    if request.param == "sqlite":
        return sqlite_database(tmp_path / "accounts.sqlite")
    server = request.getfixturevalue("postgres")
    url = server.database()
    return TestDatabase(url, lambda statements: server.sql(url, statements).splitlines())


def sqlite_database(file: Path) -> TestDatabase:
    """Return a database in a file that may not exist yet."""

    def run(statements: str) -> list[str]:
        connection = sqlite3.connect(file)
        try:
            if ";" in statements.strip().rstrip(";"):
                connection.executescript(statements)
                return []
            with connection:
                rows = connection.execute(statements).fetchall()
            return ["|".join("" if cell is None else str(cell) for cell in row) for row in rows]
        finally:
            connection.close()

    return TestDatabase(f"sqlite:///{file}", run)
