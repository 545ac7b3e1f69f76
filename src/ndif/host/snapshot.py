"""What of a checkpoint's folder is shared with clients, and how it travels to those who answer them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from ndif.stores.objects import ObjectStore

_CONFIGS = ("config.json", "*_config.json", "model_index.json")
_TEMPLATES = ("*.jinja", "chat_template.json")
_VOCABULARIES = (
    "tokenizer.json",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "*_vocab.json",
    "normalizer.json",
    "emoji.json",
    "byte_maps.json",
    "word_shape.json",
    "word_pronunciation.json",
    "vocab*.txt",
    "merges.txt",
    "dict.txt",
    "bpe.codes",
    "*.tiktoken",
    "*.spm",
    "tokenizer*.model",
    "tokenizer.model.*",
    "tiktoken.model",
    "spiece*.model",
    "spm*.model",
    "sentencepiece*.model",
)
# What is named here is shared and nothing else is: a new format of weights is withheld by itself.
_WITHOUT_WEIGHTS = (*_CONFIGS, *_TEMPLATES, *_VOCABULARIES)
_CODE = "*.py"

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Snapshot:
    """The files of one checkpoint, by the names that clients use."""

    files: dict[str, Path]
    """Those that are shared, and where their bytes lie."""
    withheld: frozenset[str] = frozenset()
    commit: str | None = None
    """The commit of the Hub that they are, if they are known to be one."""


def look(folder: Path, revision: str | None, *, share_weights: bool) -> Snapshot:
    """What of a folder is shared."""
    folder = folder.resolve()
    found = dict(sorted(_walk(folder)))
    has_code = any(
        "/" not in name and _matches(name, _CONFIGS) and _declares_code(path)
        for name, path in found.items()
    )
    shared = (*_WITHOUT_WEIGHTS, _CODE) if has_code else _WITHOUT_WEIGHTS
    files = {name: path for name, path in found.items() if share_weights or _matches(name, shared)}
    return Snapshot(files, frozenset(found.keys() - files.keys()), _own_commit(revision, folder))


def pack(snapshot: Snapshot) -> bytes:
    """The shared files and all that is known of the others, the same each time."""
    said = {"commit": snapshot.commit, "withheld": sorted(snapshot.withheld)}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = json.dumps(said).encode()
        for name, path in snapshot.files.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


async def share(folder: Path, revision: str | None, objects: ObjectStore) -> str:
    """Keep what of a folder is shared among the objects, and tell under which key.

    Raises:
        ObjectStoreError: if it is not kept.
        OSError: if it cannot be read.
    """
    content = await asyncio.to_thread(lambda: pack(look(folder, revision, share_weights=False)))
    key = f"hub/{hashlib.sha256(content).hexdigest()}.zip"
    await objects.put(key, content, soon=True)
    return key


def unpack(content: bytes, folder: Path) -> Snapshot:
    """What was packed, its files in `folder`.

    Raises:
        ValueError: if that is not what `content` is.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            said = json.loads(archive.comment)
            # Names that lead out of the folder are led back into it.
            files = {name: Path(archive.extract(name, folder)) for name in archive.namelist()}
        return Snapshot(files, frozenset(said["withheld"]), said["commit"])
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it is no archive of a checkpoint: {error}") from error


def _own_commit(revision: str | None, folder: Path) -> str | None:
    """The commit of the Hub that the files are, if they are known to be one.

    A client on this machine may use the same cache: another commit for `main` would lead it, and
    this server when it next starts, to a snapshot without weights.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    return folder.name if _is_snapshot(folder) else None


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) is not None


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """The regular files below a folder: the names that clients use, and where the bytes lie."""
    roots = [folder]
    if _is_snapshot(folder):
        # A snapshot's files are links to the repository's blobs, and those to the cache's.
        repository = folder.parent.parent
        roots += [repository / "blobs", repository.parent / "blobs"]
    for parent, folders, names in os.walk(folder):
        # `.git`, `.cache`, `.env`: no part of a checkpoint, and nobody's business.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            link = Path(parent, name)
            shown = link.relative_to(folder).as_posix()
            try:
                path = link.resolve(strict=True)
                is_file = stat.S_ISREG(path.stat().st_mode)
            except (OSError, RuntimeError):  # a link to nothing, or to itself
                continue
            is_inside = any(path.is_relative_to(root) for root in roots)
            if is_file and is_inside and not name.startswith(".") and shown.isprintable():
                yield shown, path


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in patterns)


def _declares_code(config: Path) -> bool:
    """Whether a checkpoint brings its own code; the scripts beside any other are not part of it."""
    try:
        return bool(json.loads(config.read_bytes()).get("auto_map"))
    except (OSError, ValueError, AttributeError):
        return False
