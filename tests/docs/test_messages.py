"""Messages of the server that documents quote: each exists in the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import ndif
from tests.docs.documents import DOCUMENTS, ROOT, line_of, name_of

PAGES = ("docs/users/errors.md", "docs/operators/troubleshoot.md")
SOURCE = ROOT / "src" / "ndif"


@cache
def sentences() -> str:
    """Return all string literals of the source, with placeholders as `…`."""
    assert ndif.__file__ is not None
    texts = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"\{\w*(?:!r)?\}", "…", node.value))
    return "\n".join(texts)


def quoted_in(document: Path) -> list[str]:
    quoted = []
    for row in re.findall(r"^\| (?:40\d |50\d )?(\".*?\") \|", document.read_text(), re.MULTILINE):
        quoted += re.findall(r"\"([^\"]+)\"", row)
    return quoted


def is_in_code(text: str) -> bool:
    """Return True if the source contains a sentence; `…` stands for other text."""
    # A row may omit the variable parts at the beginning and in the middle.
    parts = [re.escape(part.strip(" ")) for part in text.split("…") if part.strip(" ;,:.(")]
    return re.search("[^\n]*".join(parts), sentences()) is not None


def test_every_quoted_message_exists_in_source() -> None:
    pages = {name_of(document): document for document in DOCUMENTS}
    quoted = {page: quoted_in(pages[page]) for page in PAGES}
    assert min(map(len, quoted.values())) > 20
    missing = [
        f"{page}:{line_of(pages[page], text)}: the code never says {text!r}"
        for page, texts in quoted.items()
        for text in texts
        if not is_in_code(text)
    ]
    assert not missing, "\n".join(missing)
    assert not is_in_code("The code never says so.")
