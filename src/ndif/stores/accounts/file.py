"""Accounts in a file, which is read again after it changes.

keys:
  - key: 3f1c…            # or sha256: the key's digest in hexadecimal, so that the file holds no secret
    user: ada@example.org
    tags: [hotswapping, priority]
    weight: 2
"""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ndif.errors import problems
from ndif.schema.account import RIGHTS, Tier
from ndif.stores.accounts.keyed import KeyedAccounts
from ndif.stores.accounts.port import (
    Account,
    AccountsUnavailableError,
    KeysError,
    WithoutStore,
    account_of,
    digest_of,
    tier_with,
)


class KeyEntry(BaseModel):
    """One key of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Annotated[str, Field(min_length=8)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    user: str | None = None
    tags: tuple[Literal["hotswapping", "priority", "trusted", "gated"], ...] = ()
    weight: float = Field(default=1.0, gt=0, le=1000)

    @model_validator(mode="after")
    def _is_one(self) -> KeyEntry:
        if (self.key is None) is (self.sha256 is None):
            raise ValueError("either key or sha256 must be there, and not both")
        return self

    @property
    def digest(self) -> str:
        """Return the digest of the key."""
        return self.sha256 or digest_of(self.key or "")

    @property
    def tier(self) -> Tier:
        """Return a tier with the entry's rights and weight, named after them."""
        words: list[str] = [tag for tag in RIGHTS if tag in self.tags]
        if self.weight != 1:
            words.append(f"weight-{self.weight:g}")
        return tier_with(self.tags, "-".join(words), self.weight)

    def account(self) -> Account:
        """Return the account of the key's holder."""
        return account_of(self.digest, self.user, [self.tier])


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[KeyEntry, ...]


class FileAccounts(WithoutStore, KeyedAccounts):
    """The form of `Accounts` whose users are in a file, which operators edit."""

    def __init__(self, path: Path) -> None:
        """Read the file at `path`."""
        super().__init__()
        self._path = path
        self.warning: str | None = None
        """Sentence about other users who can read or change the keys; None if no other user can."""
        self._mark: tuple[int, int, int] | None = None
        self._accounts: dict[str, Account] = {}
        self._refresh()

    async def ping(self) -> None:
        """See `Accounts.ping`. A file that cannot be read leaves the keys as they were."""
        try:
            self._refresh()
        except KeysError as error:
            raise AccountsUnavailableError(str(error)) from error

    async def _find(self, digest: str) -> Account | None:
        # An unreadable file, such as one being written, locks no user out: its last content stays valid.
        with contextlib.suppress(KeysError):
            self._refresh()
        return self._accounts.get(self._blinded(digest))

    @property
    def trusts_any(self) -> bool:
        """Return True if the code of any user runs unconfined."""
        return any(account.trusted for account in self._accounts.values())

    def _refresh(self) -> None:
        """Read the file if its time, size or inode has changed."""
        try:
            facts = self._path.stat()
            mark = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if mark == self._mark:
                return
        except OSError as error:
            raise KeysError(f"{self._path} cannot be read: {error.strerror}.") from error
        entries = read_keys(self._path)
        self._accounts = {self._blinded(entry.digest): entry.account() for entry in entries}
        self._mark = mark
        self.warning = self._exposure(facts.st_mode, any(entry.key for entry in entries))

    def _exposure(self, mode: int, has_secrets: bool) -> str | None:
        if mode & stat.S_IWOTH:
            can = "can change it and give themselves access"
        elif mode & stat.S_IROTH and has_secrets:
            can = "can read the keys in it"
        else:
            return None
        return f"All users of this machine {can}: run `chmod o= {self._path}`."


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Return the keys in a file; raise a `KeysError` if it cannot be used."""
    try:
        return _Keys.model_validate(yaml.safe_load(path.read_text())).keys
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KeysError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
    except ValidationError as error:
        # Values are left out of the message, as one may be a key.
        first = problems(error, show_values=False)[0]
        place = first.place or "the file"
        raise KeysError(f"{path}: {place}: {first.reason}.") from error
