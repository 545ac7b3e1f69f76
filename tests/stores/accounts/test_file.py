"""Permissions: the same for everybody, or as a file says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ndif.stores.accounts import Caller, FileAccounts, KeysError, NoSuchKeyError, OpenAccounts
from tests.on_loop import on_loop

KEY = "a-key-of-ada"


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text)
    return path


@on_loop
async def test_everybody_is_let_in_and_told_apart() -> None:
    accounts = OpenAccounts(hotswapping=True)
    first, second = (
        await accounts.account(Caller("", "10.0.0.1")),
        await accounts.account(Caller("", "10.0.0.2")),
    )
    assert first.user != second.user
    assert first.hotswapping
    assert not first.trusted
    assert not (await OpenAccounts(hotswapping=False).account(Caller())).hotswapping


@on_loop
async def test_a_file_says_who_may_do_what(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"a-key-of-bob").hexdigest()
    accounts = FileAccounts(
        written(
            tmp_path,
            f"keys:\n- {{key: {KEY}, user: ada@x.org, tags: [hotswapping, trusted], weight: 3}}\n"
            f"- {{sha256: {digest}, tags: [priority]}}\n",
        )
    )
    ada = await accounts.account(Caller(KEY, "10.0.0.1"))
    assert (ada.user, ada.email, ada.weight) == ("ada@x.org", "ada@x.org", 3)
    assert (ada.hotswapping, ada.trusted, ada.priority) == (True, True, False)
    assert ada.tags == ["hotswapping"]
    bob = await accounts.account(Caller("a-key-of-bob"))
    assert (bob.hotswapping, bob.trusted, bob.priority) == (False, False, True)
    # What tells a user apart is no key.
    assert "bob" not in bob.user
    for unknown in ("", "somebody-elses", KEY + " "):
        with pytest.raises(NoSuchKeyError, match="operator"):
            await accounts.account(Caller(unknown, "10.0.0.1"))


@on_loop
async def test_two_keys_of_one_user_are_one_user(tmp_path: Path) -> None:
    accounts = FileAccounts(
        written(tmp_path, "keys:\n- {key: first-key, user: ada}\n- {key: second-key, user: ada}\n")
    )
    first, second = [await accounts.account(Caller(key)) for key in ("first-key", "second-key")]
    assert first.user == second.user


@on_loop
async def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, f"keys:\n- key: {KEY}\n")
    accounts = FileAccounts(path)
    other = tmp_path / "other.yaml"
    other.write_text("keys:\n- key: another-key\n")
    other.replace(path)
    await accounts.account(Caller("another-key"))
    with pytest.raises(NoSuchKeyError):
        await accounts.account(Caller(KEY))
    # Half a file locks nobody out.
    path.write_text("keys: [")
    await accounts.account(Caller("another-key"))
    path.unlink()
    await accounts.account(Caller("another-key"))


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
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(KeysError) as error:
        FileAccounts(written(tmp_path, text))
    assert problem in str(error.value)
    assert KEY not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="No such file"):
        FileAccounts(tmp_path / "keys.yaml")
