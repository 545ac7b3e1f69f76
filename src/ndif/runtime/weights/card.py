"""A repository's licence and tokenizer, from names, tags and files that are already known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_README, _README_BYTES = "README.md", 1 << 16
_FRONT_MATTER = re.compile(r"---\r?\n(.*?)\r?\n---", re.DOTALL)
# No YAML parser, because it would expand aliases in an untrusted card.
_LICENSE = re.compile(r"""^license:[ \t]*["']?([\w.+-]{1,64})["']?[ \t]*\r?$""", re.MULTILINE)
_TAG, _MAX_LICENSE = "license:", 64
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return True if a tokenizer's file is among these file names of a repository."""
    return not set(_TOKENIZERS).isdisjoint(names)


def license_of(tags: Iterable[str] | None) -> str | None:
    """Return the licence among the hub's tags of a repository, if any."""
    named = (tag.removeprefix(_TAG) for tag in tags or () if tag.startswith(_TAG))
    return next(named, "")[:_MAX_LICENSE] or None


def read_license(folder: Path) -> str | None:
    """Return the licence in the front matter of a repository's card, if any."""
    try:
        with (folder / _README).open(encoding="utf-8", errors="replace") as file:
            matter = _FRONT_MATTER.match(file.read(_README_BYTES))
    except OSError:
        return None
    named = None if matter is None else _LICENSE.search(matter[1])
    return None if named is None else named[1]
