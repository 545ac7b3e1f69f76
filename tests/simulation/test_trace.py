"""Traces are read line by line; errors name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ndif.simulation.trace import TraceError, TraceRequest, read, read_file, write

LINE = {"at": 1.5, "model": "org/name", "user": "ada", "run_s": 0.25}


def line(**changes: object) -> str:
    return json.dumps({**LINE, **changes})


def problems(*lines: str) -> tuple[str, ...]:
    with pytest.raises(TraceError) as caught:
        read(lines, "day.jsonl")
    return tuple(str(caught.value).splitlines())


def test_trace_line_is_read_as_request() -> None:
    (request,) = read([line()], "day.jsonl")
    assert (request.at, request.user, request.run_s) == (1.5, "ada", 0.25)
    assert request.model.repo_id == "org/name"
    assert (request.generation, request.weight, request.priority) == ("0.8", 1.0, False)


def test_optional_fields_are_read() -> None:
    (request,) = read([line(generation="0.7", weight=2, priority=True)], "day.jsonl")
    assert (request.generation, request.weight, request.priority) == ("0.7", 2.0, True)


def test_full_model_key_is_accepted() -> None:
    key = 'nnsight.modeling.language.LanguageModel:{"repo_id": "org/name", "revision": "v2"}'
    (request,) = read([line(model=key)], "day.jsonl")
    assert (request.model.repo_id, request.model.revision) == ("org/name", "v2")


def test_requests_are_sorted_stably_by_time() -> None:
    lines = [line(at=at, user=user) for at, user in ((3, "a"), (1, "b"), (3, "c"), (0, "d"))]
    assert [r.user for r in read(lines, "day.jsonl")] == ["d", "b", "a", "c"]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01T00:01:00", 60.0),
        ("1970-01-01T01:01:00+01:00", 60.0),
        ("1970-01-02", 86400.0),
    ],
)
def test_times_may_be_iso_dates_in_utc_by_default(text: str, at: float) -> None:
    (request,) = read([line(at=text)], "day.jsonl")
    assert request.at == at


def test_empty_lines_are_skipped_but_counted() -> None:
    assert len(read(["", line(), "  \n", line()], "day.jsonl")) == 2
    assert problems("", "", "no") == ("day.jsonl, line 3: this is not JSON: Expecting value.",)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("[1]", "a request must be a JSON object, not [1]"),
        ("[" * 5000, "this is not JSON"),
        (line(at=None), '"at" must be a number of seconds, at least 0, not None'),
        (line(at=-1), '"at" must be a number of seconds, at least 0, not -1'),
        (line(at="noon"), "an ISO 8601 time, like 2026-01-31T09:30:00Z, not 'noon'"),
        (line(run_s="1"), "\"run_s\" must be a number of seconds, at least 0, not '1'"),
        (line(run_s=True), '"run_s" must be a number of seconds, at least 0, not True'),
        (line(run_s=float("nan")), '"run_s" must be a number of seconds'),
        (line(run_s=10**400), '"run_s" must be a number of seconds'),
        (line(model="no repo"), "\"model\": 'no repo' names no model"),
        (line(model=""), '"model" must be text that is not empty'),
        (line(user=7), '"user" must be text that is not empty, not 7'),
        (line(generation=0.8), '"generation" must be a generation of nnsight in quotes'),
        (line(weight=0), '"weight" must be a number above 0, not 0'),
        (line(priority=1), '"priority" must be true or false, not 1'),
        (line(took=1), "'took' is not a field of a request. Fields are: at, model, user, run_s"),
        ('{"at": 1}', '"model" is missing'),
        (line(user="x" * 70_000), "the line is longer than 65,536 characters"),
    ],
)
def test_invalid_line_is_reported_with_its_number(wrong: str, expected: str) -> None:
    (problem,) = problems(line(), wrong)
    assert problem.startswith("day.jsonl, line 2: ")
    assert expected in problem
    assert problem.endswith(".")


def test_mixed_dates_and_seconds_are_refused() -> None:
    (problem,) = problems(line(at="2026-01-31"), line(at=5))
    assert problem == 'day.jsonl, line 2: "at" must be an ISO 8601 time, as in the lines before.'


def test_at_most_ten_problems_are_reported() -> None:
    assert len(problems(*["no"] * 50)) == 10


def test_empty_trace_is_refused() -> None:
    assert problems("\n") == ("day.jsonl contains no requests.",)


def test_written_trace_is_read_back(tmp_path: Path) -> None:
    requests = read(
        [line(), line(at=2, user="zoë", generation="0.7", weight=0.5, priority=True)], "day.jsonl"
    )
    write(tmp_path / "day.jsonl", requests)
    assert read_file(tmp_path / "day.jsonl") == requests
    assert isinstance(requests[0], TraceRequest)


def test_unreadable_and_unwritable_trace_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_file(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TraceError, match="is not text in UTF-8"):
        read_file(tmp_path / "latin")
    with pytest.raises(TraceError, match="cannot be written"):
        write(tmp_path / "none" / "day.jsonl", [])
