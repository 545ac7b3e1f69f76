"""Clients of Redis or Valkey. This module itself imports no client library."""

from ndif.config.settings import OLDEST_REDIS


def is_too_old(version: str) -> bool:
    """Return True for a server's `redis_version` below `OLDEST_REDIS`."""
    return _major_and_minor(version) < _major_and_minor(OLDEST_REDIS)


def _major_and_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
