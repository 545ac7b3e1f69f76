"""Accounts: who may do what. All clients alike, or the users of a file of keys.

The file is read again after it changes:

keys:
  - key: 3f1c…            # or sha256: the key's digest in hexadecimal, so that the file holds no secret
    user: ada@example.org
    tags: [hotswapping, priority]
    weight: 2
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ndif.config.settings import Settings
from ndif.errors import NdifError, problems

_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Account:
    """One user's properties, as far as requests depend on them."""

    user: str
    """Opaque name under which the user's requests take turns; no secret."""
    key: str = ""
    """Opaque digest of a verified API key, which leads back to no key; empty where none was verified."""
    email: str | None = None
    hotswapping: bool = False
    """Load models on demand for this user."""
    priority: bool = False
    """Serve this user's requests before others of their age."""
    trusted: bool = False
    """Run this user's code unconfined."""
    weight: float = 1.0
    """Share of a model beside other users."""

    @property
    def tags(self) -> list[str]:
        """Return the names of the user's privileges."""
        return [tag for tag in ("hotswapping", "priority") if getattr(self, tag)]


class NoSuchKeyError(Exception):
    """The API key is missing or unknown; the message says what to do."""


class KeysError(NdifError):
    """The file of keys cannot be used; the message says why."""


class Accounts(Protocol):
    """The users of a server."""

    async def account(self, key: str, host: str) -> Account:
        """Return the account of an API key, which may be empty, used from the machine `host`."""


def open_accounts(settings: Settings) -> Accounts:
    """Return the accounts of `NDIF_API_KEYS`, or those that need no key."""
    if settings.api_keys is None:
        return OpenAccounts(hotswapping=settings.hotswapping)
    return FileAccounts(settings.api_keys.expanduser())


def may_trust(settings: Settings) -> bool:
    """Return True if the code of some user may run unconfined, as far as this machine knows."""
    if settings.broker_url:  # gateways elsewhere have the keys
        return True
    if settings.api_keys is None:
        return False
    try:
        return FileAccounts(settings.api_keys.expanduser()).trusts_any
    except KeysError:
        return True


@dataclass(frozen=True)
class OpenAccounts:
    """The form of `Accounts` that needs no key: all users have the same privileges."""

    hotswapping: bool
    trusted: bool = False

    async def account(self, key: str, host: str) -> Account:
        """See `Accounts.account`."""
        name = _user_of(key) if key else f"host {host}" if host else ""
        return Account(name, hotswapping=self.hotswapping, trusted=self.trusted)


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Annotated[str, Field(min_length=8)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    user: str | None = None
    tags: tuple[Literal["hotswapping", "priority", "trusted"], ...] = ()
    weight: float = Field(default=1.0, gt=0, le=1000)

    @model_validator(mode="after")
    def _is_one(self) -> _Key:
        if (self.key is None) is (self.sha256 is None):
            raise ValueError("either key or sha256 must be there, and not both")
        return self

    @property
    def digest(self) -> str:
        return self.sha256 or _sha256(self.key or "")

    def account(self) -> Account:
        return Account(
            user=self.user or _user_of(self.digest),
            key=_sha256(f"ndif runner {self.digest}")[: 2 * _DIGEST],
            email=self.user,
            weight=self.weight,
            **{tag: tag in self.tags for tag in ("hotswapping", "priority", "trusted")},
        )


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[_Key, ...]


class FileAccounts:
    """The form of `Accounts` whose users are in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file at `path`."""
        self._path = path
        self._mark: tuple[int, int, int] | None = None
        self._accounts: dict[str, Account] = {}
        self._refresh()

    async def account(self, key: str, host: str) -> Account:
        """See `Accounts.account`."""
        # A file that is being written locks no user out: its last content holds.
        with contextlib.suppress(KeysError):
            self._refresh()
        if not key:
            raise NoSuchKeyError(
                "This server wants an API key: set one with nnsight.CONFIG.set_default_api_key(…), or ask "
                "its operator for one."
            )
        account = self._accounts.get(_sha256(key))
        if account is None:
            raise NoSuchKeyError("This server does not know the API key. Ask its operator for one.")
        return account

    @property
    def trusts_any(self) -> bool:
        """Return True if the code of one of the users runs unconfined."""
        return any(account.trusted for account in self._accounts.values())

    def _refresh(self) -> None:
        """Read the file if it has changed; usually no more than its date is read."""
        try:
            facts = self._path.stat()
            mark = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if mark == self._mark:
                return
            found = _Keys.model_validate(yaml.safe_load(self._path.read_text()))
        except OSError as error:
            raise KeysError(f"{self._path} cannot be read: {error.strerror}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise KeysError(f"{self._path} is not YAML: {str(error).splitlines()[0]}.") from error
        except ValidationError as error:
            # A value may be a key: it is not repeated.
            first = problems(error, show_values=False)[0]
            place = first.place or "the file"
            raise KeysError(f"{self._path}: {place}: {first.reason}.") from error
        self._accounts = {entry.digest: entry.account() for entry in found.keys}
        self._mark = mark


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _user_of(key: str) -> str:
    """Return the opaque name under which the holder of a key takes turns."""
    return f"key {_sha256(key)[:_DIGEST]}"
