from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from tests.serving import serving
from tests.tiny_models import make_gpt2, make_llama
from tests.waiting import PATIENCE_S

TINY = "test-org/tiny"
SHARED = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
WITHHELD = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.SAFETENSORS",
    "pytorch_model.bin",
    "model.Q4_1.gguf",
    "consolidated.00.pth",
    "weights.pt",
    "onnx/model.onnx",
    "tf_model.h5",
    "flax_model.msgpack",
    "word2vec.model",
    "weights.json",
    "optimizer.of_next_year",
    "train.py",
    "notes.txt",
)


@dataclass
class Served:
    """A hub on a free port of this machine, and its answers."""

    hub: HfMirror
    port: int
    answered: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/hub"

    @property
    def api(self) -> HfApi:
        return HfApi(endpoint=self.endpoint, token=False)

    def fetched_names(self) -> set[str]:
        """The files whose bytes were sent."""
        return {
            path.split("/resolve/")[1].split("/", 1)[1]
            for method, path, status in self.answered
            if method == "GET" and "/resolve/" in path and status < 300
        }


@contextlib.contextmanager
def hub_of(*models: MirroredModel, share_weights: bool = False) -> Iterator[Served]:
    hub = HfMirror(share_weights=share_weights)
    for model in models:
        hub.serve(model)
    app = Starlette(routes=[Mount("/hub", routes=hub.routes())])

    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                served.answered.append((scope["method"], scope["path"], message["status"]))
            await send(message)

        await app(scope, receive, note)

    with serving(recorded) as url:
        served = Served(hub, int(url.rpartition(":")[2]))
        yield served


def run_client(script: str, served: Served, home: Path) -> str:
    """Return the output of a fresh process whose only hub is `served`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_", "PYTHONPATH"))
    }
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "HF_ENDPOINT": served.endpoint, "HF_HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt2(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(gpt2: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint for changes."""
    return Path(shutil.copytree(gpt2, tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def tiny(gpt2: Path) -> Iterator[Served]:
    with hub_of(MirroredModel(TINY, gpt2, None, "text-generation")) as served:
        yield served


@pytest.fixture(scope="module")
def whole(gpt2: Path, llama: Path) -> Iterator[Served]:
    """A stand-in for the Hub itself: everything is shared."""
    models = [
        MirroredModel(TINY, gpt2, None, "text-generation"),
        MirroredModel("test-org/llama", llama, None, "text-generation"),
    ]
    with hub_of(*models, share_weights=True) as served:
        yield served


def commit_of(folder: Path, *, share_weights: bool = False) -> str:
    with hub_of(MirroredModel(TINY, folder, None, None), share_weights=share_weights) as served:
        sha = served.api.model_info(TINY).sha
    assert sha is not None
    return sha


# The client of the Hub


def test_model_info_is_served(tiny: Served) -> None:
    info = tiny.api.model_info(TINY)
    assert (info.id, info.pipeline_tag, info.library_name) == (
        TINY,
        "text-generation",
        "transformers",
    )
    assert (info.private, info.gated, info.disabled) == (False, False, False)
    assert {sibling.rfilename for sibling in info.siblings or ()} == SHARED
    assert info.sha is not None
    assert len(info.sha) == 40
    for revision in ("main", info.sha):
        assert tiny.api.model_info(TINY, revision=revision).sha == info.sha


def test_name_in_another_case_is_answered_with_canonical_name(tiny: Served) -> None:
    assert tiny.api.model_info("Test-Org/TINY").id == TINY


def test_file_list_omits_weights(tiny: Served) -> None:
    assert set(tiny.api.list_repo_files(TINY)) == SHARED
    entries = tiny.api.list_repo_tree(TINY)
    sizes = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
    assert sizes["config.json"] > 0


def test_tree_lists_folders(folder: Path) -> None:
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ tools }}")
    with hub_of(MirroredModel(TINY, folder, None, None)) as served:
        top = list(served.api.list_repo_tree(TINY))
        everything = list(served.api.list_repo_tree(TINY, recursive=True))
        below = list(served.api.list_repo_tree(TINY, templates.name))
        with pytest.raises(EntryNotFoundError):
            list(served.api.list_repo_tree(TINY, "no_such_folder"))
    assert [entry.path for entry in top if isinstance(entry, RepoFolder)] == [templates.name]
    assert {entry.path for entry in top if isinstance(entry, RepoFile)} == SHARED
    assert {entry.path for entry in everything} - {entry.path for entry in top} == {
        "additional_chat_templates/tools.jinja"
    }
    assert [entry.path for entry in below] == ["additional_chat_templates/tools.jinja"]


def test_file_is_downloaded(tiny: Served, gpt2: Path, tmp_path: Path) -> None:
    path = hf_hub_download(TINY, "config.json", endpoint=tiny.endpoint, cache_dir=tmp_path)
    assert Path(path).read_bytes() == (gpt2 / "config.json").read_bytes()
    assert Path(path).parent.name == tiny.api.model_info(TINY).sha


def test_snapshot_is_downloaded(tiny: Served, gpt2: Path, tmp_path: Path) -> None:
    snapshot = Path(snapshot_download(TINY, endpoint=tiny.endpoint, cache_dir=tmp_path))
    assert {path.name for path in snapshot.iterdir()} == SHARED
    for path in snapshot.iterdir():
        assert path.read_bytes() == (gpt2 / path.name).read_bytes()


def test_unserved_names_are_not_found(tiny: Served) -> None:
    with pytest.raises(RepositoryNotFoundError, match=f"serves {TINY}, not 'test-org/other'"):
        tiny.api.model_info("test-org/other")
    with pytest.raises(RevisionNotFoundError, match="at revision main alone"):
        tiny.api.model_info(TINY, revision="v2")
    with pytest.raises(RevisionNotFoundError):
        tiny.api.model_info(TINY, revision="main/config.json")
    with pytest.raises(RevisionNotFoundError):
        list(tiny.api.list_repo_tree(TINY, revision="v2"))
    assert not tiny.api.file_exists(TINY, "vocab.json")


@pytest.mark.parametrize(
    ("repo_id", "file", "revision", "error"),
    [
        ("test-org/other", "config.json", "main", RepositoryNotFoundError),
        (TINY, "config.json", "0" * 40, RevisionNotFoundError),
        (TINY, "vocab.json", "main", EntryNotFoundError),
        (TINY, "model.safetensors", "main", EntryNotFoundError),
    ],
)
def test_download_of_unserved_name_fails(
    tiny: Served, tmp_path: Path, repo_id: str, file: str, revision: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        hf_hub_download(
            repo_id, file, revision=revision, endpoint=tiny.endpoint, cache_dir=tmp_path
        )


def test_model_is_served_once_it_is_loaded(gpt2: Path) -> None:
    with hub_of() as served:
        with pytest.raises(RepositoryNotFoundError, match="not on this server yet"):
            served.api.model_info(TINY)
        served.hub.serve(MirroredModel(TINY, gpt2, None, None))
        assert served.api.model_info(TINY).id == TINY


def test_name_without_organization_is_served(gpt2: Path, tmp_path: Path) -> None:
    with hub_of(MirroredModel("gpt2", gpt2, None, "text-generation")) as served:
        assert served.api.model_info("gpt2", revision="main").id == "gpt2"
        assert set(served.api.list_repo_files("gpt2")) == SHARED
        snapshot = snapshot_download("gpt2", endpoint=served.endpoint, cache_dir=tmp_path)
        assert {path.name for path in Path(snapshot).iterdir()} == SHARED


@pytest.mark.parametrize("revision", ["v1.0", "feature/branch", "refs/pr/7", "a" * 40])
def test_configured_revision_is_served(gpt2: Path, tmp_path: Path, revision: str) -> None:
    with hub_of(MirroredModel(TINY, gpt2, revision, None)) as served:
        assert served.api.model_info(TINY, revision=revision).sha == (
            served.api.model_info(TINY).sha
        )
        assert len(list(served.api.list_repo_tree(TINY, revision=revision))) == len(SHARED)
        snapshot = snapshot_download(
            TINY, revision=revision, endpoint=served.endpoint, cache_dir=tmp_path
        )
        assert {path.name for path in Path(snapshot).iterdir()} == SHARED


# Weights


def test_only_files_needed_without_weights_are_shared(folder: Path) -> None:
    for name in WITHHELD:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"secret")
    with hub_of(MirroredModel(TINY, folder, None, None)) as served, httpx.Client() as client:
        assert set(served.api.list_repo_files(TINY)) == SHARED
        for name in WITHHELD:
            for method in ("HEAD", "GET"):
                response = client.request(method, f"{served.endpoint}/{TINY}/resolve/main/{name}")
                assert response.status_code == 404, name
                assert response.headers["X-Error-Code"] == "EntryNotFound"
                assert "--share-weights" in response.headers["X-Error-Message"]
                assert "X-Repo-Commit" not in response.headers
                assert b"secret" not in response.content


def test_withheld_file_is_not_cached_as_absent(tiny: Served, tmp_path: Path) -> None:
    for name in ("model.safetensors", "vocab.json"):
        with pytest.raises(EntryNotFoundError):
            hf_hub_download(TINY, name, endpoint=tiny.endpoint, cache_dir=tmp_path)
    absent = [path.name for path in tmp_path.rglob(".no_exist/*/*")]
    assert absent == ["vocab.json"]


def test_hidden_files_are_never_shared(folder: Path) -> None:
    (folder / ".env").write_text("TOKEN=secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    with hub_of(MirroredModel(TINY, folder, None, None), share_weights=True) as served:
        assert set(served.api.list_repo_files(TINY)) == {*SHARED, "model.safetensors"}
        assert not served.api.file_exists(TINY, ".git/config")
        assert not served.api.file_exists(TINY, ".env")


def test_range_requests_are_answered(whole: Served, gpt2: Path) -> None:
    url = f"{whole.endpoint}/{TINY}/resolve/main/model.safetensors"
    content = (gpt2 / "model.safetensors").read_bytes()
    head = httpx.head(url)
    assert int(head.headers["Content-Length"]) == len(content)
    assert head.headers["Accept-Ranges"] == "bytes"
    part = httpx.get(url, headers={"Range": "bytes=100-199", "If-Range": head.headers["ETag"]})
    assert (part.status_code, part.content) == (206, content[100:200])
    assert httpx.get(url, headers={"Range": "bytes=100-"}).content == content[100:]
    assert httpx.get(url, headers={"Range": f"bytes={len(content)}-"}).status_code == 416


# The commit


def test_commit_follows_from_content(folder: Path, tmp_path: Path) -> None:
    commit = commit_of(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile))
    assert commit_of(copy) == commit

    config = folder / "config.json"
    before = config.stat()
    config.write_bytes(config.read_bytes().replace(b"256", b"512"))
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert config.stat().st_size == before.st_size
    assert commit_of(folder) != commit

    (copy / "model.safetensors").write_bytes(b"other weights")
    assert commit_of(copy) == commit
    (copy / "vocab.json").write_text("{}")
    assert commit_of(copy) != commit


def test_commit_differs_when_weights_are_shared(folder: Path) -> None:
    commit = commit_of(folder, share_weights=True)
    assert commit != commit_of(folder)
    large = folder / "large.bin"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with_large = commit_of(folder, share_weights=True)
    assert with_large != commit
    assert commit_of(folder, share_weights=True) == with_large
    os.utime(large, (0, 0))
    assert commit_of(folder, share_weights=True) != with_large


def test_snapshot_keeps_its_commit(whole: Served, gpt2: Path, tmp_path: Path) -> None:
    """A server and a client that share a cache keep its weights."""
    snapshot = Path(snapshot_download(TINY, endpoint=whole.endpoint, cache_dir=tmp_path))
    assert (snapshot / "model.safetensors").is_symlink()
    with hub_of(MirroredModel(TINY, snapshot, None, "text-generation")) as served:
        info = served.api.model_info(TINY)
        assert info.sha == snapshot.name
        assert {sibling.rfilename for sibling in info.siblings or ()} == SHARED
        response = httpx.get(f"{served.endpoint}/{TINY}/resolve/main/tokenizer.json")
        assert response.content == (gpt2 / "tokenizer.json").read_bytes()
        for name in ("model.safetensors", "vocab.json", "config.json"):
            with contextlib.suppress(EntryNotFoundError):
                hf_hub_download(TINY, name, endpoint=served.endpoint, cache_dir=tmp_path)
        assert served.fetched_names() == {"tokenizer.json"}
    cache = snapshot.parent.parent
    assert (cache / "refs" / "main").read_text() == snapshot.name
    assert not (cache / ".no_exist").exists()
    with hub_of(MirroredModel(TINY, snapshot, None, None), share_weights=True) as served:
        response = httpx.get(f"{served.endpoint}/{TINY}/resolve/main/model.safetensors")
        assert response.content == (gpt2 / "model.safetensors").read_bytes()


# Paths


ASTRAY = (
    "../secret.json",
    "..%2Fsecret.json",
    "%2e%2e/secret.json",
    "%2e%2e%2fsecret.json",
    "..\\secret.json",
    "sub/../../secret.json",
    "sub/../config.json",
    "./config.json",
    "/config.json",
    "%2Fetc%2Fpasswd",
    "/etc/passwd",
    "config.json%00",
    "config.json/",
    "config%0dX-Evil:%201.json",
    "%ff%fe",
    "secret_config.json",
    "outside/secret_config.json",
    "loop_config.json",
    "dangling_config.json",
    "pipe_config.json",
    "sub",
    "",
    ".",
    "..",
)


@pytest.mark.parametrize("share_weights", [False, True])
def test_no_path_leads_out_of_checkpoint(folder: Path, share_weights: bool) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    for secret in (folder.parent / "secret.json", outside / "secret_config.json"):
        secret.write_text("secret")
    (folder / "sub").mkdir()
    (folder / "outside").symlink_to(outside)
    (folder / "secret_config.json").symlink_to(outside / "secret_config.json")
    (folder / "loop_config.json").symlink_to("loop_config.json")
    (folder / "dangling_config.json").symlink_to("nothing")
    os.mkfifo(folder / "pipe_config.json")
    model = MirroredModel(TINY, folder, None, None)
    with hub_of(model, share_weights=share_weights) as served:
        for path in ASTRAY:
            # Other HTTP clients normalise the path before they send it.
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
            connection.request("GET", f"/hub/{TINY}/resolve/main/{path}")
            response = connection.getresponse()
            body = response.read()
            connection.close()
            assert response.status == 404, path
            assert response.headers["X-Error-Code"] == "EntryNotFound", path
            assert response.headers["X-Evil"] is None
            assert json.loads(body)["error"]


# Clients


@pytest.mark.process
def test_nnsight_builds_its_model_from_server_alone(gpt2: Path, tmp_path: Path) -> None:
    script = f"""
import json
import nnsight
model = nnsight.TransformersModel({TINY!r})
print(json.dumps({{
    "key": model.to_model_key(),
    "tokens": model.tokenizer("The Eiffel Tower")["input_ids"],
    "chat": model.tokenizer.apply_chat_template(
        [{{"role": "user", "content": "Hi"}}], tokenize=False
    ),
    "devices": sorted({{str(each.device) for each in model._module.parameters()}}),
    "layers": len(model.transformer.h),
}}))
"""
    with hub_of(MirroredModel(TINY, gpt2, None, "text-generation")) as served:
        output = json.loads(run_client(script, served, tmp_path).splitlines()[-1])
        assert {"config.json", "tokenizer.json"} <= served.fetched_names() <= SHARED
    assert output["key"].startswith("nnsight.modeling.transformers.TransformersModel:")
    assert json.loads(output["key"].split(":", 1)[1])["repo_id"] == TINY
    assert len(output["tokens"]) > 0
    assert output["chat"] == "user: Hi\n"
    assert output["devices"] == ["meta"]
    assert output["layers"] == 4
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.process
def test_model_with_custom_code_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}})
    )
    (folder / "configuration_own.py").write_text(
        "from transformers import PretrainedConfig\nfrom .defaults import WIDTH\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n    width = WIDTH\n"
    )
    (folder / "defaults.py").write_text("WIDTH = 17\n")
    script = f"""
from transformers import AutoConfig
print(AutoConfig.from_pretrained({TINY!r}, trust_remote_code=True).width)
"""
    home = tmp_path / "home"
    home.mkdir()
    with hub_of(MirroredModel(TINY, folder, None, None)) as served:
        assert run_client(script, served, home).split() == ["17"]
        assert served.fetched_names() == {"config.json", "configuration_own.py", "defaults.py"}


@pytest.mark.process
def test_whole_model_is_loaded_with_shared_weights(
    whole: Served, gpt2: Path, llama: Path, tmp_path: Path
) -> None:
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
def logits(name):
    tokens = AutoTokenizer.from_pretrained(name)("Madison Square", return_tensors="pt")
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(name)(**tokens).logits
for name, folder in ({TINY!r}, {str(gpt2)!r}), ("test-org/llama", {str(llama)!r}):
    assert torch.equal(logits(name), logits(folder)), name
"""
    run_client(script, whole, tmp_path)
    assert "model.safetensors" in whole.fetched_names()
