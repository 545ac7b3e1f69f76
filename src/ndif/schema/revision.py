"""Revisions: the names by which users and operators choose a branch, a tag or a commit."""

from __future__ import annotations

import re

_MAX_CHARACTERS = 255
_FORBIDDEN = re.compile(r"[ ~^:?*\[\\]|\.\.|@\{|//")
_REFERENCE = "refs/"

REVISION_RULE = (
    "must be a branch, a tag or a commit in the form that Git allows: at most "
    f"{_MAX_CHARACTERS} characters, without spaces, control characters, '..', '//' or any of \\~^:?*["
)
"""The predicate of a sentence that refuses a malformed revision."""


def is_revision(text: str) -> bool:
    """Return True if a text is a well-formed name of a Git reference, or a commit.

    The rules are the ones of `git check-ref-format --allow-onelevel`. In addition, the length is limited,
    and unprintable characters of Unicode are refused.
    """
    return (
        0 < len(text) <= _MAX_CHARACTERS
        and text != "@"
        and text.isprintable()
        and not _FORBIDDEN.search(text)
        and not text.endswith(".")
        and all(
            component and not component.startswith(".") and not component.endswith(".lock")
            for component in text.split("/")
        )
    )


def is_reference(revision: str) -> bool:
    """Return True for a whole reference: `refs/pr/7` of a pull request, `refs/convert/parquet`."""
    return revision.lower().startswith(_REFERENCE)


def require_revision(text: str) -> str:
    """Return a well-formed revision; raise a `ValueError` with `REVISION_RULE` for another text."""
    if not is_revision(text):
        raise ValueError(REVISION_RULE)
    return text
