"""The cache of adapters for untrusted users, filled from a real hub on loopback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.host import hub as of_adapters
from ndif.host.hub import AdapterError, Adapters
from ndif.host.runtimes import Runtime
from ndif.schema.repositories import Repositories
from tests.on_loop import on_loop
from tests.serving import serving

pytestmark = pytest.mark.process

ROUGHLY = 30_000
"""Bytes of each adapter."""

RUNTIME = Runtime("0.8", "0.8", Path(sys.executable), ())


class Counted(HfMirror):
    """A hub that counts requests."""

    asked = 0


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Four adapters of one size."""
    served = Counted(share_weights=True)
    for name in ("one", "two", "three", "four"):
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(os.urandom(ROUGHLY))
        served.serve(MirroredModel(f"org/{name}", folder, None, None))
    app = Starlette(routes=[Mount("/hub", routes=served.routes())])

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        served.asked += 1
        await app(scope, receive, send)

    with serving(counting) as url:
        monkeypatch.setenv("HF_ENDPOINT", f"{url}/hub")
        yield served


def kept(cache: Path) -> set[str]:
    return {folder.name.rpartition("--")[2] for folder in cache.glob("models--*")}


def whole(cache: Path, name: str) -> bool:
    """Return True if the files of an adapter are complete."""
    files = list(cache.glob(f"models--org--{name}/snapshots/*/adapter_model.safetensors"))
    return len(files) == 1 and files[0].stat().st_size == ROUGHLY


@on_loop
async def test_recently_fetched_adapter_is_not_requested_again(
    hub: Counted, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    fetching = Adapters(RUNTIME, cache, 1 << 20, 1 << 30)
    await fetching.fetch({"peft": "org/one"})
    asked = hub.asked
    assert asked > 0
    assert whole(cache, "one")
    await fetching.fetch({"peft": "org/one"})
    assert hub.asked == asked
    await fetching.fetch({})
    assert hub.asked == asked


@on_loop
async def test_older_adapter_is_requested_again(
    hub: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching = Adapters(RUNTIME, tmp_path / "cache", 1 << 20, 1 << 30)
    await fetching.fetch({"peft": "org/one"})
    asked = hub.asked
    monkeypatch.setattr(of_adapters, "_CURRENT_S", 0.0)
    await fetching.fetch({"peft": "org/one"})
    assert hub.asked > asked


@on_loop
async def test_trusted_request_uses_operators_cache_and_bypasses_rules(
    hub: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, home = tmp_path / "cache", tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))
    fetching = Adapters(RUNTIME, cache, 1, 1, Repositories(denied=("org/*",)))
    await fetching.fetch({"peft": "org/one"}, trusted=True)
    assert whole(home / "hub", "one")
    assert kept(cache) == set()
    asked = hub.asked
    await fetching.fetch({"peft": "org/one"}, trusted=True)
    await fetching.fetch({"peft": str(tmp_path)}, trusted=True)
    assert hub.asked == asked
    with pytest.raises(
        AdapterError, match=r"'org/nine' cannot be used here: there is no repository"
    ):
        await fetching.fetch({"peft": "org/nine"}, trusted=True)
    # A trusted user's right does not extend to other users.
    with pytest.raises(AdapterError, match="'org/one' is not used on this server"):
        await fetching.fetch({"peft": "org/one"})


@on_loop
async def test_least_recently_used_adapters_are_evicted(hub: Counted, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fetching = Adapters(RUNTIME, cache, 1 << 20, 2 * ROUGHLY + 10_000)
    for name in ("one", "two", "one", "three"):
        await fetching.fetch({"peft": f"org/{name}"})
        assert whole(cache, name)
    assert kept(cache) == {"one", "three"}
    # An evicted adapter is fetched again.
    await fetching.fetch({"peft": "org/two"})
    assert kept(cache) == {"two", "three"}
    assert whole(cache, "two")


@on_loop
async def test_adapter_denied_by_operator_is_rejected(hub: Counted, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for rules in (Repositories(allowed=("other/*",)), Repositories(denied=("ORG/o*",))):
        fetching = Adapters(RUNTIME, cache, 1 << 20, 1 << 30, rules)
        with pytest.raises(
            AdapterError, match="'org/one' is not used on this server: its operator"
        ):
            await fetching.fetch({"peft": "org/one"})
    assert hub.asked == 0
    await fetching.fetch({"peft": "org/two"})
    assert kept(cache) == {"two"}


@pytest.mark.parametrize("suffix", ["@refs/pr/1", "/tree/refs/pr/1", "?revision=refs/pr/1"])
@on_loop
async def test_adapter_with_revision_is_rejected(hub: Counted, tmp_path: Path, suffix: str) -> None:
    fetching = Adapters(RUNTIME, tmp_path / "cache", 1 << 20, 1 << 30)
    with pytest.raises(AdapterError, match="is not the name of a repository"):
        await fetching.fetch({"peft": f"org/one{suffix}"})
    assert hub.asked == 0


@on_loop
async def test_single_adapter_is_kept_beyond_cache_limit(hub: Counted, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fetching = Adapters(RUNTIME, cache, 1 << 20, 1)
    await fetching.fetch({"peft": "org/four"})
    assert whole(cache, "four")


@on_loop
async def test_too_large_adapter_is_not_fetched(hub: Counted, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fetching = Adapters(RUNTIME, cache, ROUGHLY // 2, 1 << 30)
    with pytest.raises(AdapterError, match="this server takes at most 15kB"):
        await fetching.fetch({"peft": "org/four"})
    assert kept(cache) == set()
