"""The files of a checkpoint that are shared with clients, and their archive in the object store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from ndif.runtime.weights.repository import RepositoryError, weights
from ndif.sandbox.confinement.confinement import linked_folders
from ndif.stores.objects import ObjectStore

_CONFIGS = ("config.json", "*_config.json", "model_index.json")
_TEMPLATES = ("*.jinja", "chat_template.json")
_VOCABULARIES = (
    *("tokenizer.json", "tekken.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*.json", "*_vocab.json", "normalizer.json", "emoji.json", "byte_maps.json"),
    *("word_shape.json", "word_pronunciation.json"),
    *("vocab*.txt", "merges.txt", "dict.txt", "bpe.codes", "*.tiktoken", "*.spm"),
    *("tokenizer*.model", "tokenizer.model.*", "tiktoken.model"),
    *("spiece*.model", "spm*.model", "sentencepiece*.model"),
)
# Only files named here are shared, so that a new format of weights is withheld without a change here.
_WITHOUT_WEIGHTS = (*_CONFIGS, *_TEMPLATES, *_VOCABULARIES)
_CODE = "*.py"
_SHARED = (*_WITHOUT_WEIGHTS, _CODE)
_MAX_SHARED_BYTES, _MAX_CONFIG_BYTES = 256 << 20, 16 << 20
"""Limits of all shared files, since a server holds their archive in memory, and of one config."""
_WEIGHTS = ("*.safetensors", "*.bin")
"""Files of weights; without them, a folder of the Hub's cache holds only a config that was read."""

_HUB_TIMEOUT_S = 10.0

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Snapshot:
    """The files of one checkpoint by the names that clients use."""

    files: dict[str, Path]
    withheld: frozenset[str] = frozenset()
    commit: str | None = None
    """The Hub's commit of these files, if it is known."""


def scan(folder: Path, revision: str | None, *, share_weights: bool) -> Snapshot:
    """Return the shared files of a folder."""
    folder = folder.resolve()
    files = all_files = dict(sorted(_walk(folder)))
    if not share_weights:
        files = _smallest_files(
            {name: all_files[name] for name in all_files if _matches(name, _SHARED)}
        )
        if not any(_declares_code(name, path) for name, path in files.items()):
            files = {name: path for name, path in files.items() if not _matches(name, (_CODE,))}
    return Snapshot(
        files, frozenset(all_files.keys() - files.keys()), _own_commit(revision, folder)
    )


def find_files(checkpoint: str, revision: str | None) -> Path | None:
    """Return the checkpoint if it is a folder, or its complete copy in the Hub's cache; else None."""
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(checkpoint, "config.json", revision=revision)
    except HFValidationError:
        return None
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    has_weights = any(
        fnmatchcase(path.name, kind) for path in folder.iterdir() for kind in _WEIGHTS
    )
    is_arriving = any((folder.parent.parent / "blobs").glob("*.incomplete"))
    return folder if has_weights and not is_arriving and _has_shards(folder) else None


def _has_shards(folder: Path) -> bool:
    """Return False if an index names weights that are missing, as after an interrupted download."""
    with contextlib.suppress(RepositoryError):  # reported when the replica loads
        return all(file.exists() for file in weights(folder).files)
    return True


def fetch(repo_id: str, revision: str | None, folder: Path) -> Snapshot:
    """Download the shared files of a repository into `folder`; raise an `OSError` if the Hub refuses.

    The files do not go to the Hub's cache: a client on this machine that shares the cache would mistake the
    commit without weights for a complete one.
    """
    from huggingface_hub import HfApi, hf_hub_download

    try:
        info = HfApi().model_info(
            repo_id, revision=revision, timeout=_HUB_TIMEOUT_S, files_metadata=True
        )
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
        wanted = _smallest_names({name: sizes[name] for name in sizes if _matches(name, _SHARED)})
        for name in wanted:
            hf_hub_download(
                repo_id,
                name,
                revision=info.sha,
                local_dir=folder,
                etag_timeout=_HUB_TIMEOUT_S,
            )
    except Exception as error:
        # The Hub's library raises errors of its own, of its HTTP library and of the system.
        raise OSError(str(error)) from error
    files = scan(folder, info.sha, share_weights=False).files
    return Snapshot(files, frozenset(sizes.keys() - files.keys()), info.sha)


def pack(snapshot: Snapshot) -> bytes:
    """Return an archive of the shared files and the names of the others; equal files give equal bytes."""
    metadata = {"commit": snapshot.commit, "withheld": sorted(snapshot.withheld)}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = json.dumps(metadata).encode()
        for name, path in snapshot.files.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


async def publish(source: Path | Snapshot, revision: str | None, objects: ObjectStore) -> str:
    """Store an archive of a folder's shared files, or of a snapshot, and return its key."""

    def packed() -> bytes:
        if isinstance(source, Snapshot):
            return pack(source)
        return pack(scan(source, revision, share_weights=False))

    content = await asyncio.to_thread(packed)
    key = f"hub/{hashlib.sha256(content).hexdigest()}.zip"
    await objects.put(key, content, soon=True)
    return key


def unpack(content: bytes, folder: Path) -> Snapshot:
    """Return a packed snapshot, with its files extracted into `folder`, or raise a `ValueError`."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            metadata = json.loads(archive.comment)
            # `extract` keeps names with ".." inside the folder.
            files = {name: Path(archive.extract(name, folder)) for name in archive.namelist()}
        return Snapshot(files, frozenset(metadata["withheld"]), metadata["commit"])
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it is no archive of a checkpoint: {error}") from error


def _own_commit(revision: str | None, folder: Path) -> str | None:
    """Return the Hub's commit of the files, if it is known.

    A client on this machine may use the same cache: another commit for `main` would lead the client, and
    this server at its next start, to a snapshot without weights.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    is_commit = _COMMIT.fullmatch(folder.name) is not None
    return folder.name if is_commit and linked_folders(folder) else None


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the regular files below a folder: their names for clients and their resolved paths."""
    roots = (folder, *linked_folders(folder))
    for parent, folders, names in os.walk(folder):
        # `.git`, `.cache` and `.env` are no part of a checkpoint and may be private.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            link = Path(parent, name)
            shown = link.relative_to(folder).as_posix()
            try:
                path = link.resolve(strict=True)
                is_file = stat.S_ISREG(path.stat().st_mode)
            except (OSError, RuntimeError):  # a dangling or circular link
                continue
            is_inside = any(path.is_relative_to(root) for root in roots)
            if is_file and is_inside and not name.startswith(".") and shown.isprintable():
                yield shown, path


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in patterns)


def _smallest_files(files: Mapping[str, Path]) -> dict[str, Path]:
    """Return the smallest files, at most `_MAX_SHARED_BYTES` together."""
    fitting = _smallest_names({name: path.stat().st_size for name, path in files.items()})
    return {name: path for name, path in files.items() if name in fitting}


def _smallest_names(sizes: Mapping[str, int]) -> set[str]:
    """Return the names of the smallest files, at most `_MAX_SHARED_BYTES` together.

    The limit is needed because a repository may name any file like a vocabulary.
    """
    left, fitting = _MAX_SHARED_BYTES, set()
    for size, name in sorted((size, name) for name, size in sizes.items()):
        left -= size
        if left >= 0:
            fitting.add(name)
    return fitting


def _declares_code(name: str, path: Path) -> bool:
    """Return True if a file is a config that names code; other scripts are no part of a checkpoint."""
    if "/" in name or not _matches(name, _CONFIGS) or path.stat().st_size > _MAX_CONFIG_BYTES:
        return False
    try:
        return bool(json.loads(path.read_bytes()).get("auto_map"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
