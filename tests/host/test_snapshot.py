"""The archive of a checkpoint's shared files: complete, and without any other file."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import pytest

from ndif.host.snapshot import find_files, pack, publish, scan, unpack
from ndif.stores.objects import FileStore
from tests.on_loop import on_loop

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def checkpoint(folder: Path) -> Path:
    """Write a checkpoint with a subfolder, weights and a secret file."""
    for name, content in {
        "config.json": b"{}",
        "tokenizer.json": b'{"model": 1}' * 1000,
        "original/tokenizer.model": bytes(range(256)),
        "model.safetensors": b"weights",
        ".env": b"TOKEN=secret",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_unpacked_snapshot_equals_packed_snapshot(tmp_path: Path) -> None:
    of = checkpoint(tmp_path / "of")
    packed = pack(scan(of, COMMIT, share_weights=False))
    unpacked = unpack(packed, tmp_path / "to")
    assert set(unpacked.files) == {"config.json", "tokenizer.json", "original/tokenizer.model"}
    assert all(
        path.read_bytes() == (of / name).read_bytes() for name, path in unpacked.files.items()
    )
    assert unpacked.withheld == {"model.safetensors"}
    assert unpacked.commit == COMMIT
    assert b"secret" not in packed


def test_equal_files_give_equal_archives(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "first"), checkpoint(tmp_path / "second")
    (second / "config.json").touch()
    packed = [pack(scan(folder, None, share_weights=False)) for folder in (first, second)]
    assert packed[0] == packed[1]
    (second / "config.json").write_text('{"a": 1}')
    assert pack(scan(second, None, share_weights=False)) != packed[0]


def test_oversized_vocabulary_files_are_withheld(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "of")
    for name in ("vocab.txt", "model_index.json"):
        (folder / name).touch()
        os.truncate(folder / name, 200 << 20)
    (folder / "merges.txt").touch()
    os.truncate(folder / "merges.txt", 1 << 40)
    (folder / "deep_config.json").write_text("[" * 200_000)
    unpacked = scan(folder, None, share_weights=False)
    names = {"config.json", "deep_config.json", "tokenizer.json", "original/tokenizer.model"}
    # Of two that are as large, the first fits.
    assert set(unpacked.files) == {*names, "model_index.json"}
    assert unpacked.withheld == {"vocab.txt", "merges.txt", "model.safetensors"}


def test_checkpoint_with_missing_shard_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "snapshots" / COMMIT)
    config = str(folder / "config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: config)
    assert find_files("org/name", None) == folder
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_files("org/name", None) is None
    (folder / "model-2.safetensors").touch()
    assert find_files("org/name", None) == folder


def test_no_file_is_extracted_outside_folder(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.comment = json.dumps({"commit": None, "withheld": []}).encode()
        archive.writestr("../outside", b"")
        archive.writestr(str(tmp_path / "absolute"), b"")
    unpacked = unpack(content.getvalue(), tmp_path / "inside")
    assert all(path.is_relative_to(tmp_path / "inside") for path in unpacked.files.values())
    assert {path.name for path in tmp_path.iterdir()} == {"inside"}


@pytest.mark.parametrize(
    "content", [b"", b"no archive", pack(scan(Path("/nowhere"), None, share_weights=False))[:-3]]
)
def test_invalid_archive_is_rejected(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match="no archive of a checkpoint"):
        unpack(content, tmp_path)


@on_loop
async def test_published_snapshot_does_not_expire(tmp_path: Path) -> None:
    objects = FileStore(tmp_path / "objects", ttl_s=0)
    key = await publish(checkpoint(tmp_path / "of"), None, objects)
    await objects.sweep()
    content = await objects.get(key)
    assert content is not None
    assert "config.json" in unpack(content, tmp_path / "to").files
