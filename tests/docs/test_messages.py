"""Sentences of the server that documents quote: each is one that the code says."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

import ndif
from tests.docs.documents import DOCUMENTS, ROOT, name_of

PAGES = ("docs/users/errors.md", "docs/operators/troubleshoot.md")
SOURCE = ROOT / "src" / "ndif"


@cache
def sentences() -> str:
    """Return all texts in the source, what is put into them as `…`."""
    assert ndif.__file__ is not None
    found = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{\w*(?:!r)?\}", "…", node.value))
    return "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_every_quoted_sentence_is_one_of_the_code(page: str) -> None:
    (document,) = (each for each in DOCUMENTS if name_of(each) == page)
    quoted = []
    for row in re.findall(r"^\| (?:40\d |50\d )?(\".*?\") \|", document.read_text(), re.MULTILINE):
        quoted += re.findall(r"\"([^\"]+)\"", row)
    assert len(quoted) > 20
    # A row may leave out what differs at the beginning and in the middle.
    missing = []
    for text in quoted:
        parts = [re.escape(part.strip(" ")) for part in text.split("…") if part.strip(" ;,:.(")]
        if not re.search("[^\n]*".join(parts), sentences()):
            missing.append(text)
    assert not missing, "\n".join(missing)
