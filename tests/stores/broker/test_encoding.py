"""Encoding of requests between processes of this server, with their users and keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request, Wire
from ndif.stores.accounts import Caller, FileAccounts, OpenAccounts
from ndif.stores.broker.encoding import decode_request, encode_request
from tests.on_loop import on_loop

MODEL = DeploymentConfig("test/model", "").key


def a_request(user: str, key: str) -> Request:
    return Request(MODEL, "0.8", Wire.ENVELOPE, b"", False, "http://here", user=user, key=key)


@given(user=st.text(), key=st.text("0123456789abcdef", min_size=1))
def test_user_and_key_survive_encoding(user: str, key: str) -> None:
    request = a_request(user, key)
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize("user", ["", "host 10.0.0.1", "key 0123456789abcdef"])
def test_missing_key_survives_encoding(user: str) -> None:
    request = a_request(user, "")
    assert decode_request(encode_request(request)) == request


@on_loop
async def test_only_verified_key_gives_runner_key(tmp_path: Path) -> None:
    """On a server without keys, any text may come as a key, and two users may send the same text."""
    open_ = OpenAccounts(hotswapping=False)
    for key, host in (("", "10.0.0.1"), ("any-text", "10.0.0.1")):
        assert (await open_.account(Caller(key, host))).key == ""
    file = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"the-second-key").hexdigest()
    file.write_text(
        "keys:\n  - {key: the-first-key, user: ada}\n"
        f"  - {{sha256: {digest}, user: ada}}\n  - {{key: the-third-key}}\n"
    )
    accounts = FileAccounts(file)
    keys = [
        (await accounts.account(Caller(f"the-{which}-key", "10.0.0.1"))).key
        for which in ("first", "second", "third")
    ]
    assert len(set(keys)) == 3
    assert all(len(key) == 32 for key in keys)
    assert digest not in keys
    assert (await accounts.account(Caller("the-first-key", "10.0.0.2"))).key == keys[0]
