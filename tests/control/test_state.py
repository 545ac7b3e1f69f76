"""The problems of a server: their kinds, their subjects and their sentences."""

from __future__ import annotations

from pathlib import Path

from ndif.control.state import current_problems
from ndif.schema.server_state import ProblemKind
from ndif.simulation.virtual_time import run
from tests.queue.test_whole import World


def test_unloadable_model_is_subject_of_problem(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60}, broken=frozenset({"a/a"})) as world:
            await world.until_ended(await world.send("a/a"))
            (problem,) = current_problems(world.controller)
            assert problem.kind is ProblemKind.LOAD_FAILED
            assert problem.subject == "a/a (nnsight 0.8)"
            assert (await world.operations.status())["problems"] == [problem.text]

    run(main())


def test_calendar_problem_keeps_subject_when_numbers_change(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {}) as world:
            subjects = set()
            for minute in (3, 14):
                text = f"The event 'a/a' repeats for {minute}.5 s."
                world.reconciler._problems = (text,)
                (problem,) = world.reconciler.problems()
                assert (problem.kind, problem.text) == (ProblemKind.PROBLEM, text)
                assert (await world.operations.status())["schedule"]["problems"] == [text]
                subjects.add(problem.subject)
            assert len(subjects) == 1

    run(main())
