"""Reports in files, and the machine state that they record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.machine_state import describe_machine, machine_state
from bench.report import Report

from tests.bench.reports import MACHINE, once, report, sampled

pytestmark = pytest.mark.process


def test_report_round_trips_through_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    written = report(sampled([1.0, 3.0, 2.0]), once(20.0))
    written.write(file)
    assert Report.read(file) == written
    assert [figure["holds"] for figure in json.loads(file.read_text())["figures"]] == [True, False]


def test_runs_of_one_commit_are_merged_into_one_report(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "other.json"]
    report(sampled([1.0, 3.0]), once(20.0), once(7.0, "gone")).write(files[0])
    report(sampled([8.0]), once(30.0), once(5.0, "new")).write(files[1])
    report(once(1.0), commit="another").write(files[2])
    whole = Report.of_runs(files[:2])
    assert whole.seconds == 180
    assert [
        (figure.name, figure.value, figure.samples, figure.how) for figure in whole.figures
    ] == [
        ("a / b", 3.0, [1.0, 3.0, 8.0], "2 runs"),
        ("c", 25.0, [20.0, 30.0], "2 runs"),
        ("new", 5.0, [], ""),
    ]
    assert [figure.holds for figure in whole.figures] == [False, False, True]
    assert Report.of_runs(files[2:]) == Report.read(files[2])
    with pytest.raises(ValueError, match="are not of one commit"):
        Report.of_runs(files[1:])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "is not a report"),
        ("[1]", "is not a report"),
        ("no JSON", "is not a report"),
        ('{"machine": {}, "figures": [{"name": "a"}]}', "is not a report"),
        ('{"machine": {"cpus": 2}, "began": 1, "seconds": 1, "figures": []}', "is not a report"),
        (None, "cannot be read: No such file"),
    ],
)
def test_file_that_is_not_a_report_is_rejected(
    tmp_path: Path, text: str | None, expected: str
) -> None:
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=expected) as refused:
        Report.read(file)
    assert str(file) in str(refused.value)


def test_machine_state_is_json_with_every_key_of_reports() -> None:
    state = machine_state()
    assert state.keys() == MACHINE.keys()
    assert json.loads(json.dumps(state))["cpus"] == state["cpus"]
    assert 0.01 < state["loop_seconds"] < 60
    assert state["versions"]["nnsight"].startswith("0.8")
    assert f"{state['cpus']} x " in describe_machine(state)
