"""The download of a model, before a process without secrets loads the model."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.utils import WeakFileLock
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.host.hub import DownloadError, download, task_to_load
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.cache import CacheRules, delete_parts, in_use, scan
from ndif.runtime.weights.fetch import needed, require_readable
from ndif.tasks import end
from tests.conftest import NAME, WIDE
from tests.on_loop import on_loop
from tests.runtime.replica import HERE
from tests.serving import serving
from tests.waiting import eventually

pytestmark = pytest.mark.process

LARGE = "test-org/large"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_url: str) -> Path:
    """An empty cache and the address of a test hub."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", hub_url)
    return tmp_path / "home"


def files_in_cache(home: Path) -> set[str]:
    """Return the names of the downloaded files."""
    return {path.name for path in home.glob("hub/models--*/snapshots/*/*")}


def cached() -> dict[str, int]:
    """Return the size of each model in the cache."""
    return {
        repository.name: repository.size_bytes for repository in scan(CacheRules()).repositories
    }


@pytest.fixture
def large(tiny_gpt2: Path, tmp_path: Path) -> Iterator[str]:
    """A hub with a model that fits on no disk."""
    folder = shutil.copytree(tiny_gpt2, tmp_path / "large")
    os.truncate(folder / "model.safetensors", 8 << 40)  # a hole, which takes no space here
    hub = HfMirror(share_weights=True)
    hub.serve(MirroredModel(LARGE, folder, None, "text-generation"))
    with serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as url:
        yield f"{url}/hub"


@on_loop
async def test_download_fetches_all_files_that_loading_needs(home: Path, tiny_gpt2: Path) -> None:
    reports: list[tuple[int, int]] = []
    spec = ModelSpec(NAME, "0.8")
    facts = await download(spec, HERE, lambda loaded, total: reports.append((loaded, total)))
    assert (facts.repo_id, task_to_load(spec, facts)) == (NAME, "text-generation")
    # Progress is in bytes and ends with the total.
    assert reports[-1][0] == reports[-1][1] > (tiny_gpt2 / "model.safetensors").stat().st_size
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= files_in_cache(home)
    # Before 0.8 there were no tasks.
    assert task_to_load(ModelSpec(NAME, "0.7"), facts) is None


@on_loop
async def test_task_is_derived_from_architecture(
    home: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model card may name no task, another task, or a task that transformers does not know."""
    cards = {"none": None, "other": "feature-extraction", "unknown": "text-ranking"}
    hub = HfMirror(share_weights=True)
    for name, card in cards.items():
        hub.serve(MirroredModel(f"test-org/{name}", tiny_gpt2, None, card))
    with serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as url:
        monkeypatch.setenv("HF_ENDPOINT", f"{url}/hub")
        for name in cards:
            spec = ModelSpec(f"test-org/{name}", "0.8")
            assert task_to_load(spec, await download(spec, HERE, print)) == "text-generation"
        asked = ModelSpec("test-org/other", "0.8", task="feature-extraction")
        assert task_to_load(asked, await download(asked, HERE, print)) == "feature-extraction"


@on_loop
async def test_cached_files_are_used_without_hub(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"not in this machine's cache.* give a folder\.$"):
        await download(ModelSpec(NAME, "0.8"), HERE, print)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    await download(ModelSpec(NAME, "0.8"), HERE, print)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for task in (None, "feature-extraction"):
        asked = ModelSpec(NAME, "0.8", task=task)
        facts = await download(asked, HERE, print)
        assert facts.repo_id is None
        assert task_to_load(asked, facts) == (task or "text-generation")


@on_loop
async def test_download_of_missing_repository_is_refused(home: Path) -> None:
    with pytest.raises(DownloadError, match=r"^There is no repository 'test-org/nothing'"):
        await download(ModelSpec("test-org/nothing", "0.8"), HERE, print)


@on_loop
async def test_download_from_missing_folder_is_refused(home: Path) -> None:
    with pytest.raises(DownloadError, match=r"^'/no/such/folder' is neither a folder"):
        await download(ModelSpec("/no/such/folder", "0.8"), HERE, print)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_unreadable_checkpoint_file_is_reported(tiny_gpt2: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "model")
    (folder / "original").mkdir()
    (folder / "model.onnx").touch(0)  # this file is not loaded
    require_readable(ModelSpec(str(folder), "0.8"))
    (folder / name).chmod(0)
    code = (
        "import sys; from ndif.runtime.spec import ModelSpec; from ndif.runtime.weights import fetch\n"
        "fetch.require_readable(ModelSpec(sys.argv[1], '0.8'))"
    )
    # Root with all capabilities can read files of mode 0.
    limits = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    program = [sys.executable, "-c", code, str(folder)]
    process = subprocess.run(
        [*(limits if os.getuid() == 0 else []), *program], capture_output=True, text=True
    )
    assert process.stderr.splitlines()[-1].endswith(
        f"The user who runs the server may not read {name} in {str(folder)!r}. Permit it, for example with "
        "`chmod -R a+rX FOLDER`."
    )


@on_loop
async def test_model_larger_than_disk_is_refused(
    home: Path, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", large)
    needs = r"^'test-org/large' needs 8TiB, and .* are free on this machine's disk .* set HF_HOME"
    with pytest.raises(DownloadError, match=needs):
        await download(ModelSpec(LARGE, "0.8"), HERE, print)
    assert files_in_cache(home) == set()


@on_loop
async def test_download_evicts_unprotected_models(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await download(ModelSpec(NAME, "0.8"), HERE, print)
    size = cached()[NAME]
    protected = CacheRules(size + 1, (NAME,))
    with pytest.raises(DownloadError, match=r"'test-org/wide' needs .* \(NDIF_CACHE_BYTES\)"):
        await download(ModelSpec(WIDE, "0.8"), HERE, print, protected)
    with in_use(NAME), pytest.raises(DownloadError, match=r"NDIF_CACHE_BYTES"):
        await download(ModelSpec(WIDE, "0.8"), HERE, print, CacheRules(size + 1))
    assert [*cached()] == [NAME]
    await download(ModelSpec(WIDE, "0.8"), HERE, print, CacheRules(size + 1))
    assert [*cached()] == [WIDE]
    assert f"deleted to make room for {WIDE}: {NAME}" in caplog.text
    # Its files are cached, so nothing needs to be evicted.
    await download(ModelSpec(WIDE, "0.8"), HERE, print, CacheRules(1))


def test_needed_files_are_selected() -> None:
    small = ["config.json", "tokenizer.model", "vocab.txt", "chat_template.jinja", "own.py"]
    no_use = ["README.png", "model.onnx", "onnx/model.onnx", "original/consolidated.00.pth"]
    no_use += ["pytorch_model.bin", "flax_model.msgpack", "original/params.json"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = "model.safetensors.index.json"
    files = [*small, *no_use, *shards, index]
    assert {*needed(files, own_code=False)} == {*small, *shards, index}
    assert needed(["pytorch_model.bin", "config.json"], own_code=False) == [
        "pytorch_model.bin",
        "config.json",
    ]
    # An unusual layout.
    assert needed(["weights/a.gguf", "config.json"], own_code=False) == [
        "weights/a.gguf",
        "config.json",
    ]
    code = ["model.safetensors", "parts/own.py"]
    assert needed(code, own_code=False) == code[:1]
    assert needed(code, own_code=True) == code


@on_loop
async def test_remote_code_of_other_repository_is_fetched_only_if_trusted(
    home: Path, tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "own.py").write_text("class Own: ...\n")
    folder = shutil.copytree(tiny_gpt2, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "test-org/other--own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    hub = HfMirror(share_weights=True)
    hub.serve(MirroredModel("test-org/model", folder, None, "text-generation"))
    hub.serve(MirroredModel("test-org/other", other, None, None))
    with serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as url:
        monkeypatch.setenv("HF_ENDPOINT", f"{url}/hub")
        await download(ModelSpec("test-org/model", "0.8"), HERE, print)
        assert "own.py" not in files_in_cache(home)
        spec = ModelSpec("test-org/model", "0.8", trust_remote_code=True)
        await download(spec, HERE, print)
    assert "own.py" in files_in_cache(home)


class Dripping:
    """A hub that sends the first bytes of the weights, and no more."""

    def __init__(self, folder: Path) -> None:
        hub = HfMirror(share_weights=True)
        hub.serve(MirroredModel(NAME, folder, None, "text-generation"))
        self._app = Starlette(routes=[Mount("/hub", routes=hub.routes())])
        self._size = str((folder / "model.safetensors").stat().st_size).encode()
        self.sending = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET" or not scope["path"].endswith("model.safetensors"):
            await self._app(scope, receive, send)
            return
        self.sending += 1
        headers = [(b"content-length", self._size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.sending -= 1


@pytest.fixture
def dripping(home: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dripping]:
    app = Dripping(tiny_gpt2)
    with serving(app) as url:
        monkeypatch.setenv("HF_ENDPOINT", f"{url}/hub")
        yield app


def partial(home: Path) -> list[Path]:
    return list(home.glob("hub/models--*/blobs/*.incomplete"))


@on_loop
async def test_a_download_ends_when_it_is_cancelled(
    dripping: Dripping, home: Path, monkeypatch: pytest.MonkeyPatch, hub_url: str
) -> None:
    fetching = asyncio.create_task(download(ModelSpec(NAME, "0.8"), HERE, lambda *_: None))
    await eventually(
        lambda: dripping.sending and "tokenizer.json" in files_in_cache(home) and partial(home)
    )
    await end([fetching])
    assert partial(home) == []
    await eventually(lambda: not dripping.sending)
    # The next download reuses completed files.
    assert "tokenizer.json" in files_in_cache(home)
    monkeypatch.setenv("HF_ENDPOINT", hub_url)
    await download(ModelSpec(NAME, "0.8"), HERE, lambda *_: None)
    assert "model.safetensors" in files_in_cache(home)


@on_loop
async def test_a_download_ends_when_its_host_is_killed(dripping: Dripping, home: Path) -> None:
    code = (
        "import asyncio; from ndif.host.hub import download; from ndif.runtime.spec import ModelSpec\n"
        "from tests.runtime.replica import HERE\n"
        f"asyncio.run(download(ModelSpec({NAME!r}, '0.8'), HERE, print))"
    )
    command = sys.executable, "-c", code
    host = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        await eventually(lambda: dripping.sending and partial(home))
    finally:
        host.kill()
        await host.wait()
    await eventually(lambda: not dripping.sending and not partial(home))


def test_partial_files_of_killed_downloads_are_deleted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    cache = home / "hub"
    folder = "models--org--name"
    blobs, locks = cache / folder / "blobs", cache / ".locks" / folder
    blobs.mkdir(parents=True)
    locks.mkdir(parents=True)
    for name in ("left.1.incomplete", "arriving.2.incomplete", "whole"):
        (blobs / name).touch()
    with WeakFileLock(locks / "arriving.lock"):
        delete_parts()
    assert {file.name for file in blobs.iterdir()} == {"arriving.2.incomplete", "whole"}
