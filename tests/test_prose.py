"""Wording: docstrings name their subject, and no document or message speaks in names that are gone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import ndif

SOURCE = Path(ndif.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))
BESIDE = sorted(
    file
    for room in ("tests", "bench", "deploy", "examples", "docs")
    for file in (ROOT / room).rglob("*.py")
)
FORBIDDEN_FIRST_WORDS = frozenset(
    ("What", "Whether", "Have", "Has", "It", "Its", "They", "Them", "Those", "Who", "Whom", "Whose")
)
"""First words of docstrings without a clear subject."""


def docstrings_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those below attributes and constants included."""
    for node in ast.walk(ast.parse(file.read_text())):
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value


def first_word(text: str) -> str:
    match = re.match(r"\W*([A-Za-z]+)", text)
    return match[1] if match else ""


def test_docstrings_name_their_subject() -> None:
    riddles = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in (*FILES, *BESIDE)
        for line, text in docstrings_of(file)
        if first_word(text) in FORBIDDEN_FIRST_WORDS
    ]
    assert not riddles, "\n".join(riddles)


SUBJECT = re.compile(
    r"(?:^|[.:;!?]\s+|,\s+(?:and|but|or)\s+)(?:what|who|whoever|whatever|whichever|those)\b", re.I
)
"""A sentence or clause whose subject is a pronoun for a noun that the reader has to guess."""
RIDDLE = re.compile(
    r"\b(?:(?:is|are|was|were) to be had|has it that|(?:of|with|by|from|for|to|in|at) (?:what|whom|whose)"
    r"|of which|in which it|those (?:that|which|who|of)|whoever|nobody's|not un\w+)\b",
    re.I,
)
MAX_WORDS = 30
NAMELESS = frozenset(
    ("each", "one", "found", "known", "told", "it", "what", "those", "seen", "said", "made", "done")
)
"""Names of variables that say nothing about their values."""


def comments_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment, whose lines belong together."""
    first, lines, last = 0, list[str](), -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != last + 1:
                yield first, " ".join(lines)
                lines = []
            first = first if lines else token.start[0]
            last = token.start[0]
            lines.append(token.string.lstrip("#: "))
    if lines:
        yield first, " ".join(lines)


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences, clauses before a colon or semicolon, and list items of a text without blocks."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*|] ", prose):
        yield " ".join(sentence.split())


def riddles_in(text: str) -> Iterator[str]:
    """Yield the reason and the sentence for each sentence that a reader has to read twice."""
    for sentence in sentences_of(text):
        if match := SUBJECT.search(sentence) or RIDDLE.search(sentence):
            yield f"{match[0].strip()!r}: {sentence}"
        elif len(sentence.split()) > MAX_WORDS:
            yield f"{len(sentence.split())} words: {sentence}"


def test_sentences_have_nouns_as_subjects_and_at_most_30_words() -> None:
    riddles = [
        f"{file.relative_to(ROOT)}:{line}: {riddle}"
        for file in FILES
        for line, text in (*docstrings_of(file), *comments_of(file.read_text()))
        for riddle in riddles_in(text)
    ]
    assert not riddles, "\n".join(riddles)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Return the nodes. Those that are full are left out.", True),
        ("Limits of a key, of which none is required.", True),
        ("A number of GPUs is to be had.", True),
        ("word " * 31, True),
        ("Return the nodes that are not full.\n\n- One is chosen; the others wait.", False),
        ("Whose turn it is follows from `weight`: " + "word " * 25, False),
    ],
)
def test_checker_finds_riddles(text: str, found: bool) -> None:
    assert bool([*riddles_in(text)]) is found


def bound_names(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable and parameter; fields of classes may be wire names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    field.target = ast.Constant(None)  # type: ignore[assignment]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def test_variables_are_named_for_their_values() -> None:
    nameless = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in FILES
        for line, name in bound_names(file)
        if name in NAMELESS
    ]
    assert not nameless, "\n".join(nameless)


def test_checker_finds_nameless_variables(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("class A:\n    done: int\ndef f(it):\n    [each for each in it]\n    b = 1\n")
    assert sorted(name for _, name in bound_names(file)) == ["b", "each", "it"]


Method = ast.FunctionDef | ast.AsyncFunctionDef


def methods_of(file: Path) -> Iterator[tuple[ast.ClassDef, Method]]:
    """Yield every public method of a public class, with its class."""
    for kind in ast.walk(ast.parse(file.read_text())):
        if isinstance(kind, ast.ClassDef) and not kind.name.startswith("_"):
            for method in kind.body:
                if isinstance(method, Method) and not method.name.startswith("_"):
                    yield kind, method


def test_every_public_method_has_or_inherits_docstring() -> None:
    methods = [(file, *pair) for file in FILES for pair in methods_of(file)]
    described = {method.name for _, _, method in methods if ast.get_docstring(method)}
    assert {"claim", "run"} <= described
    ours = {kind.name for _, kind, _ in methods} | {"Protocol", "Generic", "NamedTuple"}

    def overrides_foreign(kind: ast.ClassDef) -> bool:
        bases = (ast.unparse(base).partition("[")[0] for base in kind.bases)
        return any(base not in ours for base in bases)  # names of modules have a dot

    riddles = [
        f"{file.relative_to(ROOT)}:{method.lineno}: {kind.name}.{method.name}"
        for file, kind, method in methods
        if not ast.get_docstring(method)
        and method.name not in described
        and not overrides_foreign(kind)
    ]
    assert not riddles, "\n".join(riddles)


def test_checker_finds_docstrings_below_attributes(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Module."""\nclass A:\n    """Class."""\n    b: int = 1\n    """What b is."""\n'
    )
    assert [text for _, text in docstrings_of(file)] == ["Module.", "Class.", "What b is."]
    assert first_word("`What` b is.") == "What"


DOCUMENTS = sorted(
    file
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if file.name != "CHANGELOG.md"  # describes earlier files
)


def files_missing_from(text: str, places: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """Yield line and path of every file that a text names and that no place has."""
    for match in re.finditer(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|yaml|md|json))`", text):
        name = match[1]
        # NAME is a placeholder; a command makes `build`.
        if re.search(r"[A-Z]{2}", name) or name.startswith("build/"):
            continue
        if not any((place / name).exists() for place in places):
            yield text.count("\n", 0, match.start()) + 1, name


def test_files_named_in_documents_exist() -> None:
    missing = [
        f"{document.relative_to(ROOT)}:{line}: {name} is not there"
        for document in DOCUMENTS
        for line, name in files_missing_from(document.read_text(), (ROOT, SOURCE, document.parent))
    ]
    assert not missing, "\n".join(missing)


def test_checker_finds_missing_file(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "here.md").touch()
    text = "`docs/here.md`\n`docs/gone.md` `docs/NAME.md` `build/page.md`\n"
    assert [*files_missing_from(text, [tmp_path])] == [(2, "docs/gone.md")]


def test_class_names_in_glossary_exist_in_source() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    source = "\n".join(file.read_text() for file in FILES)
    terms = set(re.findall(r"`([A-Z]\w+)`", glossary))
    assert len(terms) > 20
    assert not {term for term in terms if not re.search(rf"^class {term}\b", source, re.MULTILINE)}


def stations() -> list[tuple[str, str]]:
    """Return the files and the functions of each station of a request's walk."""
    walk = (ROOT / "docs" / "architecture.md").read_text().partition("## The walk")[2]
    rows = re.findall(r"^\| (\d+) \| (.+?): (.+?) \|", walk.partition("\n## ")[0], re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [*range(1, len(rows) + 1)]
    return [(files, functions) for _, files, functions in rows]


def test_documented_walk_has_at_most_14_existing_stations() -> None:
    assert 10 <= len(stations()) <= 14
    for files, functions in stations():
        first, *others = (SOURCE / name for name in re.findall(r"`([^`]+)`", files))
        named = "\n".join(
            file.read_text() for file in (first, *(first.parent / o.name for o in others))
        )
        for function in re.findall(r"`([^`]+)`", functions):
            assert re.search(rf"\bdef {function}\(", named), f"{files}: {function}"
