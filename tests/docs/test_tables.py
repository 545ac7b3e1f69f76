"""Tables in the repository's documents: a row without a header is shown as text with bars."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.docs.documents import DOCUMENTS, name_of, prose_of

_RULE = re.compile(r"\|(?: *:?-+:? *\|)+")


def rows_without_header(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that begins like a row below neither a rule nor a row."""
    lines = ["", *text.splitlines(), ""]
    in_table = False
    for number, line in enumerate(lines[:-1]):
        if not line.startswith("|"):
            in_table = False
        elif not in_table:
            in_table = bool(_RULE.fullmatch(lines[number + 1].strip()))
            if not in_table:
                yield number, line


def test_every_table_row_belongs_to_a_header() -> None:
    loose = [
        f"{name_of(document)}:{number}: {row}"
        for document in DOCUMENTS
        for number, row in rows_without_header(prose_of(document))
    ]
    assert not loose, "\n".join(loose)


def test_checker_finds_row_below_blank_line() -> None:
    text = "| a | b |\n| --- | :-: |\n| 1 | 2 |\n\n| 3 | 4 |\n"
    assert [*rows_without_header(text)] == [(5, "| 3 | 4 |")]
