"""Waits of tests: for events, with one bound for all, and without sleeps that a slow machine breaks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
LONGEST_S = 0.05
WAITING = ("waiting.py", "clients/comparing.py")
"""The only file that may sleep for longer, and its counterpart for clients' processes."""

PROGRAMS = ("sandbox/attacks/*.py", "sandbox/protector/blocks.py")
"""Users' programs, which sleep to make a job take time; their tests wait in other files."""
NOT_PROGRAMS = ("sandbox/attacks/harness.py", "sandbox/attacks/watch.py")
TRACES = ("trace", "generate", "session")
"""Methods whose block is a user's program, too."""


def outside_traces(text: str) -> Iterator[ast.AST]:
    """Yield the nodes of a program, without blocks that run as a job."""
    left: list[ast.AST] = [ast.parse(text)]
    while left:
        node = left.pop()
        match node:
            case ast.With(items=[ast.withitem(ast.Call(func=ast.Attribute(attr=name)))]):
                if name in TRACES:
                    continue
        yield node
        left.extend(ast.iter_child_nodes(node))


def sleeps_of(text: str) -> Iterator[int]:
    """Yield the lines of sleeps that are longer than a poll, or whose length is not a literal."""
    for node in outside_traces(text):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="time" | "asyncio" | "anyio"), attr="sleep"),
                args=[length, *_],
            ):
                short = isinstance(length, ast.Constant) and length.value <= LONGEST_S
                if not short:
                    yield node.lineno
            case ast.ImportFrom(module="time" | "asyncio", names=names):
                if any(alias.name == "sleep" for alias in names):
                    yield node.lineno


def deadlines_of(text: str) -> Iterator[int]:
    """Yield the lines that make their own deadline."""
    for node in outside_traces(text):
        match node:
            case ast.Assign(
                targets=[ast.Name(id="deadline")],
                value=ast.BinOp(
                    left=ast.Call(func=ast.Attribute(attr="monotonic" | "perf_counter" | "time"))
                ),
            ):
                yield node.lineno


def waiting_files() -> list[Path]:
    """Return the files of tests, without users' programs."""
    programs = {file for pattern in PROGRAMS for file in TESTS.glob(pattern)}
    programs -= {TESTS / name for name in NOT_PROGRAMS}
    return sorted({*TESTS.rglob("*.py")} - programs - {TESTS / name for name in WAITING})


def test_no_test_sleeps_instead_of_waiting() -> None:
    findings = [
        f"{file.relative_to(TESTS)}:{line}"
        for file in waiting_files()
        if "sleep" in (text := file.read_text())
        for line in sleeps_of(text)
    ]
    assert not findings, "wait for an event by tests/waiting.py:\n" + "\n".join(findings)


def test_no_test_sets_its_own_deadline() -> None:
    findings = [
        f"{file.relative_to(TESTS)}:{line}"
        for file in waiting_files()
        if "deadline" in (text := file.read_text())
        for line in deadlines_of(text)
    ]
    assert not findings, "wait by tests/waiting.py, whose bound is for all:\n" + "\n".join(findings)


def test_checker_finds_sleeps_and_deadlines_in_every_form() -> None:
    text = (
        "from time import sleep\n"
        "time.sleep(0.05)\n"
        "time.sleep(0.2)\n"
        "async def f():\n"
        "    await asyncio.sleep(0)\n"
        "    await asyncio.sleep(SOON_S)\n"
        "deadline = time.monotonic() + 5\n"
        "with model.trace(PROMPT):\n"
        "    time.sleep(2)\n"
    )
    assert sorted(sleeps_of(text)) == [1, 3, 6]
    assert [*deadlines_of(text)] == [7]
