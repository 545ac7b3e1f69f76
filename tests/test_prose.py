"""Wording: docstrings name their subject, and no document or message speaks in names that are gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

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
