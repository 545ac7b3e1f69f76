"""What the gateway asks of the thing that knows the users."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Account:
    """What one user is, as far as requests depend on it."""

    user: str
    """Whose turn it is when it is theirs: opaque, and no secret."""
    key: str = ""
    """Opaque digest of a verified API key (see `digest_of`); empty where no key was verified."""
    email: str | None = None
    hotswapping: bool = False
    """Whether models are loaded on demand for them."""
    priority: bool = False
    """Whether their requests go before others of their age."""
    trusted: bool = False
    """Whether their code runs unconfined."""
    weight: float = 1.0
    """Their share of a model beside others."""

    @property
    def tags(self) -> list[str]:
        """What its user may do beside what everybody may, by name."""
        return [tag for tag in ("hotswapping", "priority") if getattr(self, tag)]


class NoSuchKeyError(Exception):
    """Whoever asks is not known; the message says what to do."""


class Accounts(Protocol):
    """The users."""

    async def account(self, key: str, host: str) -> Account:
        """Who comes with this API key (or none) from this machine.

        Raises:
            NoSuchKeyError: if nobody may come so.
        """
        ...


def digest_of(secret: str) -> str:
    """Return a name for the holder of `secret`, a key or its hash, that leads back to neither."""
    return hashlib.sha256(f"ndif runner {secret}".encode()).hexdigest()[: 2 * _DIGEST]


def user_of(key: str, host: str) -> str:
    """Who shares models by turn: a key's holder, told apart by a digest of it, or else a machine."""
    if key:
        return f"key {hashlib.sha256(key.encode()).hexdigest()[:_DIGEST]}"
    return f"host {host}" if host else ""
