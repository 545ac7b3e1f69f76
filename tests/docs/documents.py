"""The documents of the repository, and the blocks of code in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHELL = frozenset(("sh", "bash", "console", "shell"))

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+?) -->\n)?"
    r"^(?P<fence>`{3,})(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_BEFORE_A_COMMAND = frozenset(("export", "command", "sudo", "exec"))


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    document: Path
    line: int
    """Number of its first line of text."""
    language: str
    text: str
    why_not_run: str
    """Reason of its mark `<!-- not run: … -->`; "" if it has none."""

    @property
    def place(self) -> str:
        """Document and line of the block."""
        return f"{name_of(self.document)}:{self.line}"


def name_of(document: Path) -> str:
    """Return a document's path in the repository."""
    return document.relative_to(ROOT).as_posix()


def line_of(document: Path, text: str) -> int:
    """Return the number of the first line in which a text begins; 0 if the document lacks the text."""
    before, separator, _ = document.read_text().partition(text)
    return before.count("\n") + 1 if separator else 0


def blocks_of(document: Path) -> Iterator[Block]:
    """Yield a document's blocks."""
    content = document.read_text()
    for match in _FENCE.finditer(content):
        line = content.count("\n", 0, match.start("text")) + 1
        yield Block(document, line, match["language"], match["text"], match["why"] or "")


def prose_of(document: Path) -> str:
    """Return a document without its blocks."""
    return _FENCE.sub("", document.read_text())


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script, without assignments and redirections."""
    pending = ""
    for line in text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            tokens = [*lexer]
        except ValueError:  # a quotation continues in the next line
            continue
        pending = ""
        yield from _simple(tokens)
    assert not pending, f"a quotation has no end: {pending!r}"


def _simple(tokens: list[str]) -> Iterator[list[str]]:
    words: list[str] = []
    is_target = False
    for token in [*tokens, ";"]:
        if set(token) <= set("<>"):
            is_target = True
        elif set(token) <= set(";|&()"):
            if words:
                yield words
            words = []
        elif is_target:
            is_target = False
        elif words or not (_ASSIGNMENT.fullmatch(token) or token in (*_BEFORE_A_COMMAND, "$")):
            words.append(token)
