"""API keys that are guessed, invented or readable by all users."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from ndif.config.settings import Settings
from ndif.launch.machine_checks import check_machine
from ndif.launch.preflight import ServerOptions, preflight
from ndif.queue.fair_queue import FairQueue
from ndif.sandbox.confinement.layers import detect_layers, missing_layers
from ndif.server.embedded import Operator
from ndif.stores.accounts import Caller, FileAccounts, NoSuchKeyError, OpenAccounts
from ndif.stores.accounts.guesses import Guesses, TooManyGuessesError
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
from tests.on_loop import on_loop
from tests.queue.entries import Waiting
from tests.security.serving import SOMEBODY, Gateway, gateway, get, needs_root, user
from tests.services.process import free_port
from tests.waiting import time_passes

pytestmark = pytest.mark.process

KEY = "the-key-of-ada"
AT_ONCE = 10
T = TypeVar("T")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A key file that only its owner can read."""
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- {{key: {KEY}, user: ada}}\n- {{key: the-key-of-bob, user: bob}}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def keyed(keys: Path, runtimes: Path, tmp_path: Path) -> Iterator[Gateway]:
    """A server behind a proxy of this machine, whose users have keys."""
    names = "ndif.example.org"
    whose = Operator()
    with gateway(
        tmp_path / "results", runtimes, whose=whose, api_keys=keys, allowed_hosts=names
    ) as started:
        yield started


def asking(path: str) -> Callable[[Gateway, dict[str, str]], int]:
    return lambda keyed, headers: get(f"{keyed.url}/{path}", headers=headers).status_code


WAYS: dict[str, Callable[[Gateway, dict[str, str]], int]] = {
    "jobs of 0.8": lambda keyed, headers: keyed.submit(**headers).status_code,
    "jobs of 0.7": lambda keyed, headers: keyed.submit_old(**headers).status_code,
    "live channels": lambda keyed, headers: keyed.subscribe(headers),
    "responses": asking("response/00000000-0000-4000-8000-000000000000"),
    "whoami": asking("whoami"),
}


@pytest.mark.parametrize("way", WAYS)
def test_wrong_keys_are_rate_limited_on_every_route(keyed: Gateway, way: str) -> None:
    guesser, other = {"x-forwarded-for": "198.51.100.7"}, {"x-forwarded-for": "198.51.100.8"}
    # A colleague behind the same address has already used a valid key.
    colleague = {**guesser, "ndif-api-key": "the-key-of-bob"}
    used = WAYS[way](keyed, colleague)
    wrong = 200 if way == "whoami" else 401
    for number in range(AT_ONCE):
        assert WAYS[way](keyed, {**guesser, "ndif-api-key": f"guess-{number}"}) == wrong
    for key in ("guess-again", KEY):
        assert WAYS[way](keyed, {**guesser, "ndif-api-key": key}) == 429
    assert WAYS[way](keyed, colleague) == used
    assert WAYS[way](keyed, {**other, "ndif-api-key": KEY}) == used
    # Other routes are limited, too, and the answer gives the time to wait.
    slowed = keyed.submit(**guesser, **{"ndif-api-key": KEY})
    assert slowed.status_code == 429
    assert 0 < int(slowed.headers["Retry-After"]) <= 10
    assert "Too many wrong API keys" in slowed.json()["detail"]


@pytest.mark.parametrize("way", WAYS)
def test_nobody_is_admitted_while_key_database_is_unavailable(
    way: str, runtimes: Path, tmp_path: Path
) -> None:
    away = "postgresql://ndif:secret@127.0.0.1:1/ndif"
    with gateway(tmp_path, runtimes, whose=Operator(), database_url=away) as served:
        for key in (KEY, "another"):
            assert WAYS[way](served, {"ndif-api-key": key}) == 503
        refused = served.submit(**{"ndif-api-key": KEY})
        assert refused.headers["Retry-After"] == "5"
        assert refused.json()["detail"].startswith("This server cannot reach its database of API")
        # Keyless requests need no database.
        assert served.submit().status_code == 401


def test_revoked_database_key_is_rejected_by_running_server(runtimes: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/accounts.sqlite"
    registry = SqlRegistry(Database(url))
    row = asyncio.run(_then_close(registry, registry.create_key("ada@example.org")))
    key = row.api_key
    with gateway(
        tmp_path, runtimes, whose=Operator(), database_url=url, accounts_cache_s=0.2
    ) as served:
        assert served.accepted(served.submit(**{"ndif-api-key": key})).user == "ada@example.org"
        answer = get(f"{served.url}/whoami", headers={"ndif-api-key": key}).json()
        assert answer == {"email": "ada@example.org", "tags": []}
        asyncio.run(_then_close(registry, registry.revoke(row.id)))
        time_passes(0.3)
        refused = served.submit(**{"ndif-api-key": key})
        assert refused.status_code == 401
        assert "was revoked" in refused.json()["detail"]


async def _then_close(registry: SqlRegistry, asked: Awaitable[T]) -> T:
    try:
        return await asked
    finally:
        await registry.close()


@needs_root
def test_guesses_of_another_local_user_do_not_lock_out_others(keyed: Gateway) -> None:
    with user(SOMEBODY):
        for number in range(AT_ONCE + 1):
            refused = keyed.submit(**{"ndif-api-key": f"guess-{number}"})
        assert refused.status_code == 429
    assert keyed.submit(**{"ndif-api-key": KEY}).status_code == 200


def test_keyless_requests_do_not_count_as_guesses(keyed: Gateway) -> None:
    for _ in range(2 * AT_ONCE):
        assert keyed.submit().status_code == 401
    assert keyed.submit(**{"ndif-api-key": KEY}).status_code == 200


def test_guesses_are_limited_to_one_per_ten_seconds_after_burst() -> None:
    guesses, digests = Guesses(), map(str, itertools.count())

    def is_admitted(now: float) -> bool:
        digest = next(digests)
        with contextlib.suppress(TooManyGuessesError):
            guesses.check("host 10.0.0.1", digest, now)
            guesses.record("host 10.0.0.1", digest, now, is_right=False)
            return True
        return False

    assert [is_admitted(1000.0) for _ in range(12)] == [True] * 10 + [False] * 2
    # An hour of guessing twenty times a second.
    assert sum(is_admitted(1000.0 + step / 20) for step in range(72_000)) == 359
    assert all(is_admitted(10_000.0) for _ in range(10))


def test_repeated_wrong_key_does_not_block_other_keys_of_address() -> None:
    guesses = Guesses()
    for now in range(1000):
        guesses.record("host 10.0.0.1", "revoked", now, is_right=False)
    guesses.check("host 10.0.0.1", "of a colleague, and new", 1000.0)


def test_guesses_remember_bounded_number_of_callers() -> None:
    guesses = Guesses()
    for number in range(10_000):
        guesses.record(f"host {number}", "wrong", 0.0, is_right=False)
        guesses.record(f"host {number}", f"right {number}", 0.0, is_right=True)
    assert len(guesses._forgotten_at) == len(guesses._proven) == 4096
    assert "host 9999" in guesses._forgotten_at


@on_loop
async def test_keys_are_compared_by_digests_with_process_secret(keys: Path) -> None:
    """Each process mixes a random secret into the digests, so that comparison times reveal nothing."""
    first, second = FileAccounts(keys), FileAccounts(keys)
    assert not {*first._accounts} & {*second._accounts}
    assert (
        (await first.account(Caller(KEY))).user == (await second.account(Caller(KEY))).user == "ada"
    )
    with pytest.raises(NoSuchKeyError):
        await first.account(Caller(next(iter(first._accounts))))


# A key file that other users may read


@pytest.mark.parametrize(
    ("mode", "content", "warning"),
    [
        (0o600, "key: the-key-of-ada", None),
        (0o640, "key: the-key-of-ada", None),  # a group that the operator made
        (0o644, "key: the-key-of-ada", "All users of this machine can read the keys in it"),
        (0o644, f"sha256: {'a' * 64}", None),  # it contains no secret
        (0o646, f"sha256: {'a' * 64}", "All users of this machine can change it"),
        (0o602, "key: the-key-of-ada", "All users of this machine can change it"),
    ],
)
def test_key_file_open_to_other_users_causes_warning(
    keys: Path, tmp_path: Path, runtimes: Path, mode: int, content: str, warning: str | None
) -> None:
    keys.write_text(f"keys:\n- {{{content}}}\n")
    keys.chmod(mode)
    options = Settings(api_keys=keys, session_root=tmp_path, runtimes_dir=runtimes, sandbox="off")
    prepared = preflight(options, ServerOptions("127.0.0.1", free_port(), (), None))
    assert prepared.listening is not None
    prepared.listening.close()
    (check,) = [check for check in check_machine(options) if check.name == "API keys"]
    if warning is None:
        assert prepared.warning is None
        assert check.state == "ok"
    else:
        assert prepared.warning is not None
        assert prepared.warning.startswith(warning)
        assert f"`chmod o= {keys}`" in prepared.warning
        assert (check.state, check.detail) == ("note", prepared.warning)


# Invented keys on servers without keys


@on_loop
async def test_invented_keys_do_not_change_user() -> None:
    accounts = OpenAccounts(hotswapping=True)
    for caller in (
        [Caller(f"invented-{number}", "10.0.0.7") for number in range(5)],
        [Caller("", f"2001:db8:1:2::{number:x}") for number in range(1, 5)],  # the same network
        [Caller("", "127.0.0.1", 1000), Caller("k", "::1", 1000)],
    ):
        assert len({(await accounts.account(address)).user for address in caller}) == 1
    different = [
        Caller("k", "10.0.0.7"),
        Caller("k", "10.0.0.8"),
        Caller("k", "2001:db8:1:2::1"),
        Caller("k", "2001:db8:1:3::1"),
        Caller("k", "127.0.0.1"),
        Caller("k", "127.0.0.1", 1000),
        Caller("k", "127.0.0.1", 1001),
    ]
    assert len({(await accounts.account(address)).user for address in different}) == len(different)


@on_loop
async def test_invented_keys_gain_no_queue_position() -> None:
    """Eight jobs come from one address, each with another key; then one comes from an honest user."""
    accounts, queue = OpenAccounts(hotswapping=True), FairQueue[Waiting]()
    for number in range(8):
        account = await accounts.account(Caller(f"invented-{number}", "10.0.0.7"))
        queue.add(Waiting(f"flood-{number}", account.user, float(number)))
    honest = await accounts.account(Caller("", "10.0.0.8"))
    queue.add(Waiting("honest", honest.user, 9.0))
    assert {entry.id: place for entry, place in queue.positions()}["honest"] <= 2


def test_invented_keys_on_open_server_are_one_user(runtimes: Path, tmp_path: Path) -> None:
    with gateway(tmp_path, runtimes, whose=Operator()) as served:
        users = {
            served.accepted(submit(**{"ndif-api-key": f"invented-{number}"})).user
            for number in range(3)
            for submit in (served.submit, served.submit_old)
        }
    assert len(users) == 1


# Adapters of other users


@pytest.mark.skipif(bool(missing_layers(detect_layers())), reason="this machine cannot confine")
def test_confined_process_cannot_list_names_of_other_users_adapters(tmp_path: Path) -> None:
    adapter = tmp_path / "models--ada--unpublished"
    (adapter / "snapshots").mkdir(parents=True)
    (adapter / "snapshots" / "adapter_config.json").write_text("of ada")
    ran = subprocess.run(
        [sys.executable, "-c", _CONFINED, tmp_path], capture_output=True, text=True, check=True
    )
    # The adapter is readable by name.
    assert ran.stdout.split("\n")[:4] == ["PermissionError"] * 3 + ["of ada"]


_CONFINED = """
import os, sys
from pathlib import Path
from typing import TypeVar
from ndif.sandbox.confinement.confinement import Confinement

root, here = Path(sys.argv[1]), os.dup(1)
confinement = Confinement.prepare(
    "require", readable=[], unlisted=[root], memory_bytes=1 << 30, result_bytes=0, max_threads=64
)
channel = confinement.detach(here)
confinement.apply()
said = []
adapter = root / "models--ada--unpublished"
for folder in (root, adapter, adapter / "snapshots"):
    try:
        said.append(str(os.listdir(folder)))
    except OSError as error:
        said.append(type(error).__name__)
said.append((adapter / "snapshots/adapter_config.json").read_text())
os.write(channel, "\\n".join(said).encode())
"""
