"""Checkpoint files that are checked before they are loaded: honest ones and attacks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndif.runtime.weights.repository import RepositoryError, require_harmless, weights
from ndif.sandbox.confinement.confinement import checkpoint_paths

AUTHOR = "/home/author/models/base"
"""A path of another machine; honest configs contain many of these."""


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with one file of weights."""
    folder = tmp_path / "model"
    write(folder, "config.json", {"model_type": "gpt2"})
    write(folder, "tokenizer.json", {})
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A checkpoint in the Hub's cache."""
    repository = tmp_path / "cache" / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, content in (("config.json", "{}"), ("model.safetensors", "")):
        (repository / "blobs" / name).write_text(content)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


def require(folder: Path, *, remote_code: bool = False, pickled: bool = False) -> None:
    require_harmless(folder, remote_code=remote_code, pickled=pickled)


HONEST: dict[str, Any] = {
    "config.json": {
        "_name_or_path": AUTHOR,
        "name_or_path": AUTHOR,
        "text_config": {"_name_or_path": "../base"},
        "auto_map": {"AutoModel": f"{AUTHOR}--modeling.Model"},
        "vocab_file": "/home/author/vocab.txt",
        "backbone": "resnet50",
        "backbone_config": {"model_type": "resnet", "pretrained": AUTHOR},
    },
    "tokenizer_config.json": {
        "name_or_path": AUTHOR,
        "special_tokens_map_file": f"{AUTHOR}/special_tokens_map.json",
        "tokenizer_file": f"{AUTHOR}/tokenizer.json",
        "vocab_file": f"{AUTHOR}/vocab.json",
        "chat_template": "{{ '/' }} .. {% for x in y %}../{% endfor %}",
        "added_tokens_decoder": {"0": {"content": "/"}},
        "extra_special_tokens": ["/", "..", "../x"],
        "vocab": [["/usr", -1.0], ["..", -2.0]],
    },
    "special_tokens_map.json": {"bos_token": "/", "additional_special_tokens": [".."]},
    "adapter_config.json": {"base_model_name_or_path": AUTHOR},
    "generation_config.json": {"_from_model_config": True},
    "trainer_state.json": {"best_model_checkpoint": "../out/checkpoint-1"},
    "model.safetensors.index.json": {"metadata": {}, "weight_map": {"a": "part/one.safetensors"}},
}


def test_harmless_paths_in_configs_are_accepted(folder: Path) -> None:
    for name, content in HONEST.items():
        write(folder, name, content)
    (folder / "pytorch_model.bin").touch()
    (folder / "training_args.bin").touch()
    require(folder)


def test_links_of_cache_and_operator_are_accepted(
    folder: Path, snapshot: Path, tmp_path: Path
) -> None:
    require(snapshot)
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    (folder / "model.safetensors").rename(elsewhere / "model.safetensors")
    (folder / "model.safetensors").symlink_to(elsewhere / "model.safetensors")
    (folder / "again.json").symlink_to("config.json")
    (folder / "gone.json").symlink_to("/nowhere/at/all")
    (folder / "circle").symlink_to("circle")
    require(folder)


def test_accepted_files_match_paths_open_to_confined_process(
    folder: Path, snapshot: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (folder / "model.safetensors").rename(disk / "weights")
    (folder / "model.safetensors").symlink_to(disk / "weights")
    (folder / "circle").symlink_to("circle")
    require(folder)
    assert set(checkpoint_paths(folder)) == {folder, disk / "weights"}
    # A link to a folder is not a link to a weights file, whatever its name.
    (folder / "more.safetensors").symlink_to(disk)
    assert set(checkpoint_paths(folder)) == {folder, disk / "weights"}
    with pytest.raises(RepositoryError, match="is a link to"):
        require(folder)
    # The operator may put the blobs on another disk.
    repository = snapshot.parent.parent
    blobs = (repository / "blobs").rename(disk / "blobs")
    (repository / "blobs").symlink_to(blobs)
    require(snapshot)
    assert {blobs / "config.json", blobs / "model.safetensors"} <= set(checkpoint_paths(snapshot))
    (snapshot / "other.safetensors").symlink_to(disk / "weights")
    assert disk / "weights" not in checkpoint_paths(snapshot)
    with pytest.raises(RepositoryError, match="is a link to"):
        require(snapshot)


ATTACKS: dict[str, tuple[str, Any]] = {
    "weights elsewhere": ("config.json", {"transformers_weights": "/private/a.safetensors"}),
    "weights above": ("config.json", {"transformers_weights": "x/../../a.safetensors"}),
    "a config above": ("config.json", {"configuration_files": ["config.4/../../../x.json"]}),
    "a backbone of timm": ("config.json", {"backbone": "local-dir:/private/model"}),
    "a backbone within": ("config.json", {"vision_config": {"architecture": "local-dir:/private"}}),
    "a shard elsewhere": (
        "model.safetensors.index.json",
        {"metadata": {}, "weight_map": {"a": "/private/a.safetensors"}},
    ),
    "a shard above": (
        "pytorch_model.bin.index.json",
        {"metadata": {}, "weight_map": {"a": "one.bin", "b": "../../two.bin"}},
    ),
    "a vocabulary": ("tokenizer_config.json", {"entity_vocab_file": "/etc/passwd"}),
    "a vocabulary by its text": ("tokenizer_config.json", {"vocab": "/etc/passwd"}),
    "a model of sentencepiece": (
        "tokenizer_config.json",
        {"sp_model_kwargs": {"model_file": "/private/spm.model"}},
    ),
    "a tokenizer, merged last": ("special_tokens_map.json", {"tokenizer_file": "/private/t.json"}),
    "a tokenizer of GGUF": ("tokenizer_config.json", {"gguf_file": "../../private.gguf"}),
    "arguments by place": ("tokenizer_config.json", {"init_inputs": ["/etc/passwd"]}),
    "fast tokenizers": ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4/../../t"]}),
    "options of mecab": (
        "tokenizer_config.json",
        {"mecab_kwargs": {"mecab_option": "-r /private/mecabrc"}},
    ),
    "a tokenizer for audio": (
        "processor_config.json",
        {"audio_tokenizer": {"audio_tokenizer_name_or_path": "/private/model"}},
    ),
    "voices": (
        "speaker_embeddings_config.json",
        {"speaker_embeddings": {"repo_or_path": "/private", "v1": {"semantic": "x.npy"}}},
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_config_path_outside_repository_is_refused(attack: str, folder: Path) -> None:
    name, content = ATTACKS[attack]
    (folder / "tokenizer.json").unlink()
    write(folder, name, content)
    with pytest.raises(RepositoryError, match=rf"Its {name} names '.*' as '.*'\. A repository may"):
        require(folder, pickled=True)


def test_adapter_base_path_is_refused_if_it_is_read(folder: Path, snapshot: Path) -> None:
    # If there is a config, only a checkpoint that is loaded by name has its adapter config read.
    write(snapshot, "adapter_config.json", {"base_model_name_or_path": "/private/model"})
    with pytest.raises(RepositoryError, match="base_model_name_or_path"):
        require(snapshot)
    write(folder, "adapter_config.json", {"base_model_name_or_path": "../private"})
    require(folder)
    (folder / "config.json").unlink()
    with pytest.raises(RepositoryError, match="base_model_name_or_path"):
        require(folder)


def test_auto_map_is_checked_only_if_remote_code_is_trusted(folder: Path) -> None:
    write(folder, "config.json", {"auto_map": {"AutoModel": "/private/model--own.Model"}})
    require(folder)
    with pytest.raises(RepositoryError, match="auto_map"):
        require(folder, remote_code=True)
    write(folder, "config.json", {"auto_map": {"AutoModel": "org/name--own.Model"}})
    require(folder, remote_code=True)


LINKS: dict[str, tuple[str, str]] = {
    "a config": ("generation_config.json", "/etc/passwd"),
    "a folder": ("more", "/etc"),
    "the root": (".hidden/root", "/"),
    "a folder above": ("above", ".."),
}


@pytest.mark.parametrize("attack", LINKS)
def test_link_out_of_checkpoint_folder_is_refused(attack: str, folder: Path) -> None:
    name, target = LINKS[attack]
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(target)
    with pytest.raises(RepositoryError, match="outside of the checkpoint's folder"):
        require(folder)


def test_snapshot_link_to_other_repository_is_refused(snapshot: Path, tmp_path: Path) -> None:
    private = tmp_path / "cache" / "models--org--private" / "blobs"
    private.mkdir(parents=True)
    (private / "weights").touch()
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(private / "weights")
    with pytest.raises(RepositoryError, match="outside of the checkpoint's folder"):
        require(snapshot)


@pytest.mark.parametrize(
    ("name", "size", "limit"),
    [
        ("config.json", 17 << 20, "16MiB"),
        ("model.safetensors.index.json", 33 << 20, "32MiB"),
        ("tokenizer.json", 129 << 20, "128MiB"),
        ("processor/tokenizer_config.json", 17 << 20, "16MiB"),
    ],
)
def test_parsed_files_have_a_size_limit(name: str, size: int, limit: str, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    os.truncate(folder / name, size)
    with pytest.raises(RepositoryError, match=f"may have {limit}"):
        require(folder)


def test_deeply_nested_json_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[" * 200_000)
    with pytest.raises(RepositoryError, match="nested too deeply"):
        require(folder)


def test_invalid_json_is_left_to_the_library(folder: Path) -> None:
    (folder / "generation_config.json").write_bytes(b"\xff{")
    (folder / "tokenizer_config.json").write_text("[1, 2")
    os.mkfifo(folder / "added_tokens.json")
    require(folder)


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def as_pickled_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.bin")
    write(folder, "pytorch_model.bin.index.json", {"weight_map": {"a": "one.bin"}})


def as_pickle_in_an_index_of_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "one.safetensors", "b": "two.bin"}}
    write(folder, "model.safetensors.index.json", index)


def as_explicit_pickle(folder: Path) -> None:
    write(folder, "config.json", {"transformers_weights": "adapter_model.bin"})
    (folder / "adapter_model.bin").touch()


@pytest.mark.parametrize(
    "prepare",
    [as_pickle, as_pickled_shards, as_pickle_in_an_index_of_safetensors, as_explicit_pickle],
)
def test_pickled_weights_are_refused_unless_allowed(
    prepare: Callable[[Path], None], folder: Path
) -> None:
    prepare(folder)
    require(folder, pickled=True)
    with pytest.raises(RepositoryError, match=r"weights are pickled .*NDIF_ALLOW_PICKLED_WEIGHTS"):
        require(folder)


def test_weights_lists_files_and_dtype_of_index(folder: Path) -> None:
    assert weights(folder).files == (folder / "model.safetensors",)
    (folder / "model.safetensors").unlink()
    index = {
        "metadata": {"dtype": "float64"},
        "weight_map": {"a": "2.st", "b": "1.st", "c": "2.st"},
    }
    write(folder, "model.safetensors.index.json", index)
    repository = weights(folder)
    assert repository.files == (folder / "1.st", folder / "2.st")
    assert repository.dtype == "float64"
    write(folder, "model.safetensors.index.json", {"weight_map": {"a": 1}})
    with pytest.raises(RepositoryError, match="does not say which file holds which weight"):
        weights(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert weights(folder).files == ()
