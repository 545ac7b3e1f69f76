"""Links of a document, from its place in the repository to its place on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping

PLACES: Mapping[str, str] = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    ".env.example": "reference/variables.md",
    "docs/decisions": "decisions/README.md",
    "docs/users/notebook.ipynb": "users/notebook.md",
}
"""Places on the site of what lies elsewhere in the repository."""

_FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<text>\[(?:[^\[\]`]|`[^`]*`)*\])\((?P<target>[^()\s]+)\)")
_NOTE = re.compile(r"^<!-- not run: .*? -->\n", re.MULTILINE | re.DOTALL)


def targets(markdown: str) -> Iterator[str]:
    """Yield the targets of a document's links, those in code left out."""
    for text in _prose(markdown):
        yield from (found["target"] for found in _LINK.finditer(text))


def moved_to_the_site(markdown: str, document: str, page: str) -> str:
    """Return a document as a page: links lead to pages, and notes for tests are left out.

    `document` is its path in the repository, `page` on the site.
    """

    def moved(found: re.Match[str]) -> str:
        target, hash_, anchor = found["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        place = PLACES.get(path)
        if place is None and path.startswith("docs/"):
            place = path.removeprefix("docs/")
        if place is None:  # a file that the site does not have
            return found["text"][1:-1]
        return f"{found['text']}({posixpath.relpath(place, posixpath.dirname(page) or '.')}{hash_}{anchor})"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return _NOTE.sub("", "".join([*parts, _LINK.sub(moved, markdown[end:])]))


def _prose(markdown: str) -> Iterator[str]:
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield markdown[end : fence.start()]
        end = fence.end()
    yield markdown[end:]
