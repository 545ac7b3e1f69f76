"""Accounts in a file: when the file is read, and errors of invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndif.stores.accounts import (
    AccountsUnavailableError,
    Caller,
    FileAccounts,
    KeysError,
    NoSuchKeyError,
)
from tests.on_loop import on_loop

KEY = "a-key-of-ada"


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text)
    return path


@on_loop
async def test_changed_key_file_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, f"keys:\n- key: {KEY}\n")
    accounts = FileAccounts(path)
    other = tmp_path / "other.yaml"
    other.write_text("keys:\n- key: another-key\n")
    other.replace(path)
    await accounts.account(Caller("another-key"))
    with pytest.raises(NoSuchKeyError):
        await accounts.account(Caller(KEY))
    # A partially written file locks nobody out.
    await accounts.ping()
    path.write_text("keys: [")
    await accounts.account(Caller("another-key"))
    path.unlink()
    await accounts.account(Caller("another-key"))
    with pytest.raises(AccountsUnavailableError, match="No such file"):
        await accounts.ping()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("keys: [", "is not YAML"),
        ("", "the file: "),
        ("keys: 3", "keys: "),
        ("keys:\n- key: short\n", "keys.0.key: "),
        ("keys:\n- {}\n", "either key or sha256"),
        (f"keys:\n- {{key: {KEY}, sha256: {'f' * 64}}}\n", "either key or sha256"),
        (f"keys:\n- {{key: {KEY}, tags: [root]}}\n", "keys.0.tags.0: "),
        (f"keys:\n- {{key: {KEY}, weight: 0}}\n", "keys.0.weight: "),
        (f"keys:\n- {{key: {KEY}, weight: .inf}}\n", "keys.0.weight: "),
        (f"keys:\n- {{key: {KEY}, name: ada}}\n", "keys.0.name: "),
    ],
)
def test_invalid_key_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(KeysError) as error:
        FileAccounts(written(tmp_path, text))
    assert problem in str(error.value)
    assert KEY not in str(error.value)


def test_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="No such file"):
        FileAccounts(tmp_path / "keys.yaml")
