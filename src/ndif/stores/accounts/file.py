"""Users by their keys in a YAML file, which is read again after it changes.

keys:
  - key: 3f1c…            # or sha256: the key's digest in hexadecimal, so that the file holds no secret
    user: ada@example.org
    tags: [hotswapping, priority]
    weight: 2
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ndif.errors import NdifError, problems
from ndif.stores.accounts.port import Account, NoSuchKeyError, digest_of, user_of


class KeysError(NdifError):
    """The file of keys cannot be used; the message says why."""


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
        return self.sha256 or hashlib.sha256((self.key or "").encode()).hexdigest()


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[_Key, ...]


class FileAccounts:
    """The form of `Accounts` whose users are in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file at `path`.

        Raises:
            KeysError: if the file cannot be used.
        """
        self._path = path
        self._mark: tuple[int, int, int] | None = None
        self._accounts: dict[str, Account] = {}
        self._refresh()

    async def account(self, key: str, host: str) -> Account:
        """See `Accounts.account`."""
        self._refresh_if_usable()  # usually reads no more than the file's date
        if not key:
            raise NoSuchKeyError(
                "This server wants an API key: set one with nnsight.CONFIG.set_default_api_key(…), or ask "
                "its operator for one."
            )
        account = self._accounts.get(hashlib.sha256(key.encode()).hexdigest())
        if account is None:
            raise NoSuchKeyError("This server does not know the API key. Ask its operator for one.")
        return account

    def _refresh_if_usable(self) -> None:
        """Read a changed file; one that is being written locks no user out, and the last content holds."""
        try:
            self._refresh()
        except KeysError:
            return

    def _refresh(self) -> None:
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
        self._accounts = {entry.digest: _account(entry) for entry in found.keys}
        self._mark = mark


def _account(entry: _Key) -> Account:
    tags = {tag: tag in entry.tags for tag in ("hotswapping", "priority", "trusted")}
    return Account(
        user=entry.user or user_of(entry.digest, ""),
        key=digest_of(entry.digest),
        email=entry.user,
        weight=entry.weight,
        **tags,
    )
