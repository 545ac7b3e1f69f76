"""Commands, options and variables that documents name: each exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from ndif.cli.main import cli
from ndif.config.ndif_names import FIELDS
from ndif.config.reference import name_of as variable_of
from ndif.config.settings import Settings
from tests.docs import documents
from tests.docs.documents import (
    DOCUMENTS,
    SHELL,
    blocks_of,
    commands_of,
    line_of,
    name_of,
    prose_of,
)

OF_CLIENTS = {"NDIF_HOST", "NDIF_API_KEY"}
OF_COMPOSE = {"NDIF_IMAGE", "NDIF_SUBNET"}
OF_OTHERS = {"docs/differences.md"}
"""Documents whose tables have another server's names in the first column."""
VARIABLES = (
    {variable_of(field) for field in Settings.model_fields} | {*FIELDS} | OF_CLIENTS | OF_COMPOSE
)


def find_command(words: Sequence[str]) -> tuple[click.Command, click.Context, list[str]]:
    """Return the command that words name, and the words after its name."""
    command: click.Command = cli
    context = click.Context(cli, info_name="ndif")
    rest = [*words]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        following = command.get_command(context, rest[0])
        if following is None:
            raise click.UsageError(f"{context.info_name} has no command {rest[0]!r}")
        command, context = following, click.Context(following, info_name=rest.pop(0))
    return command, context, rest


def problem(words: Sequence[str]) -> str | None:
    """Return click's error for a command line; None if it is valid."""
    try:
        command, context, rest = find_command(words)
        if isinstance(command, click.Group):
            is_help = rest and set(rest) <= {"--help", "-h"}
            return None if is_help else f"{context.info_name} needs a command"
        values, _, _ = command.make_parser(context).parse_args(rest)
        for parameter in command.params:
            value = values.get(parameter.name or "")
            if isinstance(parameter.type, click.Choice) and isinstance(value, str):
                parameter.type.convert(value, parameter, context)
            # Click marks a missing argument with a special object.
            is_given = isinstance(value, str | list | tuple) and bool(value)
            if isinstance(parameter, click.Argument) and parameter.required and not is_given:
                return f"{context.info_name} needs {parameter.name}"
    except click.UsageError as error:
        return error.format_message()
    return None


def test_command_lines_in_blocks_are_valid() -> None:
    problems = []
    for block in (block for document in DOCUMENTS for block in blocks_of(document)):
        if block.language in SHELL:
            lines = commands_of(block.text)
        elif not block.language:  # maybe a terminal session with output
            typed = re.findall(r"^(?:\$ )?(ndif .*)$", block.text, re.MULTILINE)
            lines = commands_of("\n".join(typed))
        else:
            continue
        problems += [
            f"{block.place}: {' '.join(words)}: {why}"
            for words in lines
            if Path(words[0]).name == "ndif" and (why := problem(words[1:]))
        ]
    assert not problems, "\n".join(problems)


def problems_in_sentences(document: Path) -> Iterator[str]:
    """Yield a line for each missing command or option that a document's sentences name."""
    for text in re.findall(r"`ndif ([a-z][^`]*)`", prose_of(document)):
        place = f"{name_of(document)}:{line_of(document, f'`ndif {text}`')}: `ndif {text}`"
        # `keys list|show KEY [--json]`: the name ends where a form begins.
        name = re.match(r"[a-z]+(?:[ -][a-z]+(?:\\?\|[a-z]+)*)*", text)
        assert name is not None
        for words in alternatives(name[0].split(" ")):
            try:
                command, context, _ = find_command(words)
            except click.UsageError as error:
                yield f"{place}: {error.format_message()}"
                continue
            options = {
                option
                for parameter in command.get_params(context)
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
            if lacking := set(re.findall(r"(?<!\S)\[?(--[a-z][a-z-]*)", text)) - options:
                yield f"{place}: no {', '.join(sorted(lacking))}"


def test_commands_named_in_sentences_exist() -> None:
    problems = [problem for document in DOCUMENTS for problem in problems_in_sentences(document)]
    assert not problems, "\n".join(problems)


def test_checker_finds_missing_command_in_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("`ndif status [--json]` and\n`ndif statuz`, `ndif keys list|shov --wach`\n")
    assert [*problems_in_sentences(page)] == [
        "page.md:2: `ndif statuz`: ndif has no command 'statuz'",
        "page.md:2: `ndif keys list|shov --wach`: no --wach",
        "page.md:2: `ndif keys list|shov --wach`: keys has no command 'shov'",
    ]


def alternatives(words: list[str]) -> list[list[str]]:
    """Return the command lines that `a b|c` stands for."""
    lines: list[list[str]] = [[]]
    for word in words:
        lines = [[*line, part] for line in lines for part in re.split(r"\\?\|", word)]
    return lines


def own_text(document: Path) -> str:
    """Return a document without another server's names."""
    text = document.read_text()
    if name_of(document) in OF_OTHERS:
        return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    return text


def test_server_reads_every_variable_named_in_documents() -> None:
    unread = [
        f"{name_of(document)}:{line_of(document, name)}: nothing reads {name}"
        for document in DOCUMENTS
        for name in sorted(
            set(re.findall(r"\bNDIF_[A-Z0-9_]*[A-Z0-9]\b", own_text(document))) - VARIABLES
        )
    ]
    assert not unread, "\n".join(unread)


def test_limits_page_shows_default_values() -> None:
    from ndif.config.reference import as_text, variables

    (page,) = (document for document in DOCUMENTS if name_of(document) == "docs/users/limits.md")
    defaults = {
        variable.name: as_text(variable.default, variable.unit) or "none"
        for variable in variables(Settings.model_construct())
    }
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$", page.read_text(), re.MULTILINE)
    checked = 0
    for shown, names in rows:
        for name in re.findall(r"`(NDIF_\w+)`", names):
            if name != "NDIF_MAX_LOG_LINES_PER_S":
                default = "1GiB" if name == "NDIF_MAX_RESULT_BYTES" else defaults[name]
                assert shown.split(",")[0] == default, name
                checked += 1
    assert checked > 12


def test_command_lines_are_parsed_like_shell() -> None:
    script = "A=b ndif start --detach && ndif status > file  # why\nexport C='d\ne'\nx \\\n  y | z"
    assert [*commands_of(script)] == [
        ["ndif", "start", "--detach"],
        ["ndif", "status"],
        ["x", "y"],
        ["z"],
    ]
    assert problem(["statuz"]) == "ndif has no command 'statuz'"
    assert problem(["status", "--wach", "2s"]) == "No such option '--wach'. Did you mean '--watch'?"
    assert problem(["keys"]) == "keys needs a command"
    assert problem(["kill"]) == "kill needs request_id"
    assert problem(["logs", "nowhere"]) is not None
