"""Checks of a checkpoint's files before a library loads them.

The author of a repository controls its configs, and transformers opens some of the paths in them. Paths
that no library opens (`_name_or_path`, often a folder of the author's machine) are ignored. The security
boundary is the confinement of the loading process. These checks only give a clear error in cases in
which the confinement would show a missing file.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os import walk
from pathlib import Path
from typing import Any

from ndif.runtime.tracebacks import UserFacingError
from ndif.sandbox.confinement.confinement import WEIGHTS, linked_folders
from ndif.sizes import format_size

CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_INDEX = ".index.json"

_TOKENIZER_FILES = ("*_config.json", "special_tokens_map.json")
"""Configs whose keys become arguments of a tokenizer, which opens the values of `*_file` keys."""
_READ = (CONFIG, "config.*.json", *_TOKENIZER_FILES, "added_tokens.json", "chat_template.json")
_VOCABULARIES = ("tokenizer*.json", "vocab*.json", "tekken.json")
_LARGEST = (
    (f"*{_INDEX}", 32 << 20),
    *((name, 16 << 20) for name in _READ),
    *((name, 128 << 20) for name in _VOCABULARIES),
)
"""Largest sizes of parsed files, by the first pattern that matches the name.

Indexes of the largest models have 20 MB, and tokenizers 35 MB. Hostile JSON takes 20 times its size when
parsed.
"""

_PATHS = frozenset(
    (
        # In the config of a model.
        *("transformers_weights", "backbone", "architecture"),
        # In the configs of tokenizers and processors.
        *("gguf_file", "vocab", "merges", "audio_tokenizer_name_or_path", "repo_or_path"),
        *("mecab_option", "sudachi_config_path", "sudachi_resource_dir"),
    )
)
"""Keys whose value is a path that a library opens or passes on to be opened."""
_CODE = frozenset(("auto_map", "custom_pipelines"))
"""Keys that name Python code; they are read only if the repository's code is trusted."""
_COLLECTIONS = _CODE | {
    *("configuration_files", "fast_tokenizer_files", "init_inputs", "speaker_embeddings"),
    "weight_map",
}
"""Keys of lists and objects in which every string is such a path."""
_REPLACED = frozenset(("tokenizer_file", "special_tokens_map_file", "tokenizer_config_file"))
"""Keys of a tokenizer's config that transformers overwrites; they may hold paths of another machine."""
_BEFORE_CONVERSION = frozenset(("vocab_file", "merges_file"))
"""Keys that are read only if there is no tokenizer.json."""
_WORDS = re.compile(r"[\s:=,]+|--")
"""Separators around a path in a value: "local-dir:/a", "-d /a", "/a--module.Class"."""

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class RepositoryError(UserFacingError):
    """A checkpoint's files must not be loaded; the message is the reason."""


def require_harmless(folder: Path, *, remote_code: bool, pickled: bool) -> None:
    """Raise a RepositoryError if loading the checkpoint in `folder` could reach beyond it.

    Args:
        folder: A folder of the Hub's cache, or an operator's own.
        remote_code: True if the operator trusts the repository's Python code.
        pickled: True to permit pickled weights, which can run code when they are read.
    """
    for file in sorted(folder.rglob("*")):
        if file.is_symlink():
            _require_inside(file, folder)
    for file in _parsed_files(folder):
        for key, value in _entries(_read_json(file, folder)):
            if _is_path(file, folder, key, remote_code=remote_code) and _leaves_folder(value):
                raise RepositoryError(
                    f"Its {file.relative_to(folder)} names {value[:_MAX_SHOWN]!r} as {key!r}. A repository "
                    "may only name its own files, without `..` and without a leading slash."
                )
    if not pickled and (pickles := [file for file in weights(folder).files if is_pickled(file)]):
        raise RepositoryError(
            f"Its weights are pickled ({pickles[0].name}), and reading a pickle can run code. Ask its "
            "author for safetensors; the server's operator can allow pickled weights "
            "(NDIF_ALLOW_PICKLED_WEIGHTS)."
        )


_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Weights:
    """The files from which transformers loads the weights of a checkpoint, existing or not."""

    files: tuple[Path, ...]
    dtype: str | None = None
    """The dtype that the index of the files names, if any."""


def weights(folder: Path) -> Weights:
    """Return the weights of the checkpoint in `folder`; raise RepositoryError for an invalid index."""
    config = _read_json(folder / CONFIG, folder)
    explicit = config.get("transformers_weights") if isinstance(config, dict) else None
    names = [explicit] if isinstance(explicit, str) else [*_WEIGHTS, *_PICKLED]
    first = next((folder / name for name in names if (folder / name).is_file()), None)
    if first is None:  # a distributed checkpoint, or none
        return Weights(tuple(sorted(folder.glob("*.safetensors"))))
    if not first.name.endswith(_INDEX):
        return Weights((first,))
    index = _read_json(first, folder)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise RepositoryError(f"Its {first.name} does not say which file holds which weight.")
    metadata = index.get("metadata")
    dtype = metadata.get("dtype") if isinstance(metadata, dict) else None
    files = tuple(folder / name for name in sorted(set(shards.values())))
    return Weights(files, dtype if isinstance(dtype, str) else None)


def largest(name: str) -> int | None:
    """Return the largest size that a file of this name may have; None if such files are not parsed."""
    return next((size for kind, size in _LARGEST if fnmatchcase(name, kind)), None)


def is_pickled(file: Path) -> bool:
    """Return True if transformers would unpickle a file of weights with this name."""
    return file.suffix != ".safetensors"


def _require_inside(link: Path, folder: Path) -> None:
    """Raise a RepositoryError if a link leads outside the folder and its repository's cache.

    In an operator's own folder, links to files of weights are permitted.
    """
    try:
        target = link.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError):  # a dangling or circular link cannot be read
        return
    blobs = linked_folders(folder)
    if not blobs and stat.S_ISREG(mode) and link.suffix in WEIGHTS:
        return
    if not any(target.is_relative_to(root) for root in (folder.resolve(), *blobs)):
        raise RepositoryError(
            f"Its {link.relative_to(folder)} is a link to {target}, outside of the checkpoint's folder. "
            "Put a copy of the file there instead."
        )


def _parsed_files(folder: Path) -> Iterator[Path]:
    """Yield the configs and indexes of a checkpoint; raise a RepositoryError if a file is too large."""
    for parent, folders, names in walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(names):
            limit = largest(name)
            file = Path(parent, name)
            if limit is None or not file.is_file():
                continue
            size = file.stat().st_size
            if size > limit:
                raise RepositoryError(
                    f"Its {file.relative_to(folder)} has {format_size(size)}; such a file may have "
                    f"{format_size(limit)}."
                )
            if name.endswith(_INDEX) or any(fnmatchcase(name, kind) for kind in _READ):
                yield file


def _read_json(file: Path, folder: Path) -> Any:
    """Return a file's content as transformers would read it; None if it is not JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise RepositoryError(
            f"Its {file.relative_to(folder)} is nested too deeply to be read."
        ) from error
    except (OSError, ValueError):  # loading reports the error
        return None


def _entries(content: Any) -> Iterator[tuple[str, str]]:
    """Yield every string in a JSON value with its key; within one of `_COLLECTIONS`, with that key."""
    stack: list[tuple[str, Any]] = [("", content)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict):
            stack += [(key if key in _COLLECTIONS else name, item) for name, item in value.items()]
        elif isinstance(value, list):
            stack += [(key if key in _COLLECTIONS else "", item) for item in value]


def _is_path(file: Path, folder: Path, key: str, *, remote_code: bool) -> bool:
    """Return True if transformers opens the path in this key of a config."""
    if key in _CODE:
        return remote_code
    if file.name == _ADAPTER:
        # With a config beside it, an adapter's base is loaded only for a checkpoint that is loaded by name.
        is_base = key == "base_model_name_or_path"
        return is_base and (bool(linked_folders(folder)) or not (folder / CONFIG).exists())
    if key in _PATHS or key in _COLLECTIONS:
        return True
    if not key.endswith("_file") or not any(
        fnmatchcase(file.name, kind) for kind in _TOKENIZER_FILES
    ):
        return False
    if file.name == "special_tokens_map.json":  # merged last, so no key of it is overwritten
        return True
    is_converted = key in _BEFORE_CONVERSION and file.with_name("tokenizer.json").exists()
    return key not in _REPLACED and not is_converted


def _leaves_folder(path: str) -> bool:
    """Return True if a value contains an absolute path or `..`."""
    return any(
        word.startswith("/") or ".." in re.split(r"[/\\]", word) for word in _WORDS.split(path)
    )
