"""Accounts: who may do what. All clients alike, a local server's owner, or the users of a file of keys.

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
import hmac
import ipaddress
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ndif.config.settings import Settings
from ndif.errors import NdifError, problems
from ndif.stores.guesses import Guesses

_DIGEST = 16
_SITE_BITS = 64
"""Bits of an IPv6 address that its holder did not choose."""
_ROOT = 0


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sends a request, as far as its connection and its headers tell."""

    key: str = ""
    """API key as it was sent; empty without one."""
    address: str = ""
    """IP address; the client's own where a configured proxy names it."""
    uid: int | None = None
    """User of the process of this machine that has the connection's other end; None if not known."""

    @property
    def name(self) -> str:
        """Return the name under which the caller takes turns without an account; nobody can choose it."""
        if self.uid is not None:
            return f"uid {self.uid}"
        try:
            address = ipaddress.ip_address(self.address)
        except ValueError:
            return f"host {self.address}" if self.address else ""
        if address.version == 4 or address.is_loopback:
            return f"host {address}"
        return f"host {ipaddress.ip_network((address, _SITE_BITS), strict=False)}"


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

    async def account(self, caller: Caller) -> Account:
        """Return the account of a caller; raise a `NoSuchKeyError` if there is none."""


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

    async def account(self, caller: Caller) -> Account:
        """See `Accounts.account`. A key says nothing here: whoever invents keys is the same user."""
        return Account(caller.name, hotswapping=self.hotswapping, trusted=self.trusted)


@dataclass(frozen=True)
class OwnerAccounts:
    """The form of `Accounts` of a local server: its owner needs nothing, everybody else its token.

    Root, in a process of the same machine, counts as the owner.
    """

    owner: int
    """User who runs the server."""
    token: str
    trusted: bool

    async def account(self, caller: Caller) -> Account:
        """See `Accounts.account`."""
        if caller.uid not in (self.owner, _ROOT) and not secrets.compare_digest(
            caller.key.encode(errors="replace"), self.token.encode()
        ):
            raise NoSuchKeyError(
                "This server runs the code of the user who started it, on the same machine, and of those "
                "who have its token. On your side run the line `export NDIF_API_KEY=…` that `ndif local "
                "start` printed, or ask whoever started it for that line."
            )
        return Account(caller.name, trusted=self.trusted)


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
        self._blind = secrets.token_bytes(_DIGEST)
        self._guesses = Guesses()
        self.warning: str | None = None
        """Sentence that says who else can read or change the keys; None if nobody can."""
        self._mark: tuple[int, int, int] | None = None
        self._accounts: dict[str, Account] = {}
        self._refresh()

    async def account(self, caller: Caller) -> Account:
        """See `Accounts.account`. An address that keeps on guessing gets a `TooManyGuessesError`."""
        # A file that is being written locks no user out: its last content holds.
        with contextlib.suppress(KeysError):
            self._refresh()
        if not caller.key:
            raise NoSuchKeyError(
                "This server wants an API key: set one with nnsight.CONFIG.set_default_api_key(…), or ask "
                "its operator for one."
            )
        digest, now = self._blinded(_sha256(caller.key)), time.monotonic()
        self._guesses.check(caller.name, digest, now)
        account = self._accounts.get(digest)
        self._guesses.note(caller.name, digest, now, is_right=account is not None)
        if account is None:
            raise NoSuchKeyError("This server does not know the API key. Ask its operator for one.")
        return account

    def _blinded(self, digest: str) -> str:
        """Return what the time of a comparison may tell of: nobody outside can choose or foresee it."""
        return hmac.new(self._blind, digest.encode(), hashlib.sha256).hexdigest()

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
        self._accounts = {self._blinded(entry.digest): entry.account() for entry in found.keys}
        self._mark = mark
        self.warning = self._exposure(facts.st_mode, any(entry.key for entry in found.keys))

    def _exposure(self, mode: int, has_secrets: bool) -> str | None:
        if mode & stat.S_IWOTH:
            can = "can change it, and let themselves in"
        elif mode & stat.S_IROTH and has_secrets:
            can = "can read the keys in it"
        else:
            return None
        return f"All users of this machine {can}: run `chmod o= {self._path}`."


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _user_of(key: str) -> str:
    """Return the opaque name under which the holder of a key takes turns."""
    return f"key {_sha256(key)[:_DIGEST]}"
