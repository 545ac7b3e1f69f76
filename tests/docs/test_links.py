"""Links in the repository's documents: each leads to an existing file and heading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from docs.make.hooks import REFERENCES
from docs.make.links import moved_to_the_site, targets

from tests.docs.documents import DOCUMENTS, ROOT, line_of, name_of, prose_of

SITE_ALONE = {f"docs/{place}" for place in REFERENCES}
"""Pages that exist only on the site, whose front page links to them."""


@cache
def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub and the site make them."""
    slugs: set[str] = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", prose_of(document), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in slugs:
            number += 1
        slugs.add(anchor)
    return slugs


def broken_links(document: Path) -> Iterator[str]:
    """Yield the links of a document that lead to no file, or to no heading of one."""
    for target in targets(document.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
        if name in SITE_ALONE and document.name == "index.md":
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def test_every_link_target_exists() -> None:
    broken = [
        f"{name_of(document)}:{line_of(document, f'({target})')}: {target} leads nowhere"
        for document in DOCUMENTS
        for target in broken_links(document)
    ]
    assert not broken, "\n".join(broken)


def test_checker_finds_broken_link(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading\n")
    document = tmp_path / "page.md"
    document.write_text(
        "[a](other.md) [b](other.md#a-heading)\n[c](other.md#nowhere)\n[d](gone.md)\n"
    )
    assert [*broken_links(document)] == ["other.md#nowhere", "gone.md"]
    assert [line_of(document, f"({target})") for target in broken_links(document)] == [2, 3]


def test_decision_index_lists_every_decision() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = [*targets((folder / "README.md").read_text())]
    assert listed == sorted(file.name for file in folder.glob("[0-9]*.md"))


def test_external_links_use_https() -> None:
    outside = {
        target
        for document in DOCUMENTS
        for target in targets(document.read_text())
        if "://" in target
    }
    assert outside
    assert not {target for target in outside if not target.startswith("https://")}


@pytest.mark.parametrize(
    ("document", "page", "link", "becomes"),
    [
        ("README.md", "overview.md", "[a](docs/gpu.md#memory)", "[a](gpu.md#memory)"),
        ("README.md", "overview.md", "[a](docs/decisions)", "[a](decisions/README.md)"),
        ("README.md", "overview.md", "[`a`](examples/demo.py)", "`a`"),
        ("docs/objects.md", "objects.md", "[a](../README.md#install)", "[a](overview.md#install)"),
        ("docs/objects.md", "objects.md", "[a](../.env.example)", "[a](reference/variables.md)"),
        ("docs/users/a.md", "users/a.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("docs/users/a.md", "users/a.md", "[a](notebook.ipynb)", "[a](notebook.md)"),
        (
            "docs/users/a.md",
            "users/a.md",
            "[a](#b) [c](https://d.e/f)",
            "[a](#b) [c](https://d.e/f)",
        ),
        ("docs/gpu.md", "gpu.md", "```sh\n[a](../LICENSE)\n```\n", "```sh\n[a](../LICENSE)\n```\n"),
        ("docs/gpu.md", "gpu.md", "<!-- not run: b -->\n```sh\nc\n```\n", "```sh\nc\n```\n"),
    ],
)
def test_links_are_rewritten_for_site(document: str, page: str, link: str, becomes: str) -> None:
    assert moved_to_the_site(link, document, page) == becomes
