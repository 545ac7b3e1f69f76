from __future__ import annotations

import pytest

from ndif.schema.deployment import DeploymentConfig
from tests.schedule.calendars import (
    NOW,
    YEAR,
    calendar,
    event,
    once,
    read,
    spans,
)

# Settings


def config_of(*lines: str, summary: str = "org/model", **options: object) -> DeploymentConfig:
    schedule = read(calendar(once(*lines, summary=summary)), now=NOW, **options)  # type: ignore[arg-type]
    assert schedule.problems == ()
    ((window,),) = schedule.timelines
    return window.config


def problem_of(*lines: str, summary: str = "org/model") -> str:
    schedule = read(calendar(once(*lines, summary=summary)), now=NOW)
    assert schedule.timelines == ()
    (problem,) = schedule.problems
    return problem


@pytest.mark.parametrize(
    "description",
    [
        "replicas: 3\\ndtype: float16",
        "replicas: 3\\, dtype: float16".join(["{", "}"]),
        '{"replicas": 3\\, "dtype": "float16"}',
        "<p>replicas: 3</p><p>dtype: float16</p>",
        "<span>replicas:&nbsp\\;3</span><br>dtype: float16<br>",
        "repo_id: org/model\\nreplicas: 3\\ndtype: float16",
        "dedicated: true\\nreplicas: 3\\ndtype: float16",
    ],
)
def test_settings_in_description_are_read(description: str) -> None:
    assert config_of(f"DESCRIPTION:{description}") == DeploymentConfig(
        "org/model", "org/model", replicas=3, dtype="float16", dedicated=True
    )


@pytest.mark.parametrize(
    "description",
    [
        "",
        "\\n",
        "Ask Anna.",
        "Note: bring coffee",
        "See: https://x.org\\nWhere: lab",
        "[draft",
        "- a",
    ],
)
def test_prose_description_sets_nothing(description: str) -> None:
    assert config_of(f"DESCRIPTION:{description}") == DeploymentConfig(
        "org/model", "org/model", dedicated=True
    )


def test_model_key_as_title_names_model() -> None:
    key = 'nnsight.modeling.language.LanguageModel:{"repo_id": "a/b"\\, "revision": "v2"}'
    assert config_of(summary=key) == DeploymentConfig("a/b", "a/b", revision="v2", dedicated=True)


def test_repo_id_in_description_overrides_title() -> None:
    config = config_of("DESCRIPTION:repo_id: gpt2\\nreplicas: 2", summary="Anna's course")
    assert config == DeploymentConfig("gpt2", "gpt2", replicas=2, dedicated=True)


def test_unset_settings_come_from_deployment_of_server() -> None:
    deployments = [
        DeploymentConfig("org/Model", "/models/old", revision="v1"),
        DeploymentConfig("org/Model", "/models/new", dtype="float16", trust_remote_code=True),
        DeploymentConfig("local", "/models/local", replicas=4),
    ]
    assert config_of(deployments=deployments) == DeploymentConfig(
        "org/Model", "/models/new", dtype="float16", trust_remote_code=True, dedicated=True
    )
    assert config_of(summary="local", deployments=deployments).checkpoint == "/models/local"
    assert (
        config_of("DESCRIPTION:replicas: 2", summary="local", deployments=deployments).replicas == 2
    )
    key = 'nnsight.modeling.language.LanguageModel:{"repo_id": "org/Model"\\, "revision": "v1"}'
    assert config_of(summary=key, deployments=deployments).checkpoint == "/models/old"
    other = key.replace("v1", "v3")
    assert config_of(summary=other, deployments=deployments).checkpoint == "org/Model"


@pytest.mark.parametrize(
    ("lines", "summary", "why"),
    [
        ([], "Lunch", "names no model: call it by a repo id, like openai-community/gpt2."),
        ([], "Lunch / dinner", "cannot be used: 'Lunch / dinner' names no model: give a repo id"),
        (["DESCRIPTION:replicas: two"], "a/b", "replicas must be a whole number, not 'two'."),
        (["DESCRIPTION:replica: 2"], "a/b", "'replica' is not a setting; did you mean 'replicas'?"),
        (["DESCRIPTION:replicas: 2\\nfoo: 1"], "a/b", "'foo' is not a setting. There are: "),
        (["DESCRIPTION:replicas: ["], "a/b", "settings in its description that are no YAML: "),
        (["DESCRIPTION:{replicas: 1"], "a/b", "settings in its description that are no YAML: "),
        (["DESCRIPTION:dedicated: false"], "a/b", "every model in the schedule is dedicated."),
        (["DESCRIPTION:checkpoint: /etc"], "a/b", "may not say where weights come from."),
        (["DESCRIPTION:trust_remote_code: true"], "a/b", "a calendar may not have code run."),
        (["DESCRIPTION:task: &a [*a]"], "a/b", "that are no plain mapping."),
        (["DESCRIPTION:repo_id: 7"], "a/b", "has a repo_id that is no text: 7."),
        (
            ["DESCRIPTION:replicas: " + "[" * 5000],
            "a/b",
            "settings in its description that are too long or too deeply nested.",
        ),
        (["EXRULE:FREQ=DAILY"], "a/b", "has an EXRULE"),
        (["RRULE:FREQ=DAILY;INTERVAL=0"], "a/b", "INTERVAL is not a positive number."),
        (["RRULE:FREQ=SOMETIMES"], "a/b", "rule"),
        (["RRULE:COUNT=3"], "a/b", "has a rule without a FREQ."),
        (["RRULE:FREQ=DAILY;RSCALE=CHINESE"], "a/b", "has a rule with RSCALE"),
        (["RRULE:FREQ=DAILY;UNTIL=soon"], "a/b", "rule"),
        (["RDATE:yesterday"], "a/b", "has a RDATE that is no date: 'yesterday'."),
        (["DTSTART:20261005T090000Z"], "a/b", "has more than one DTSTART."),
    ],
)
def test_problem_of_event_is_reported(lines: list[str], summary: str, why: str) -> None:
    problem = problem_of(*lines, summary=summary)
    assert problem.startswith(f"The event {summary!r} of 2026-10-05 ")
    assert why in problem
    assert problem.endswith((".", "?."))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "The event 'org/model' has no start."),
        (["DTSTART:tomorrow"], "The event 'org/model' of tomorrow has a DTSTART that is no date"),
        (["DTSTART:20261332T090000"], "of 2026-13-32 has a DTSTART that is no date"),
        (["DTSTART:20261005T090000Z"], "of 2026-10-05 has no end."),
        (["DTSTART:20261005T090000Z", "DTEND:20261005T090000Z"], "ends when or before it starts."),
        (["DTSTART:20261005T090000Z", "DTEND:20261004T090000Z"], "ends when or before it starts."),
        (["DTSTART:20261005T090000Z", "DURATION:soon"], "has a DURATION that is not valid."),
        (["DTSTART:20261005T090000Z", "DURATION:P9999999D"], "beyond the year 9999."),
        (["DTSTART;TZID=America:20261005T090000"], "not known."),
        (["DTSTART;TZID=Atlantis/City:20261005T090000"], "'Atlantis/City', which is not known."),
        (["DTSTART;TZID=../../etc/passwd:20261005T090000"], "which is not known."),
    ],
)
def test_event_without_valid_time_is_reported(lines: list[str], why: str) -> None:
    schedule = read(calendar(event(*lines), once(uid="good", summary="org/good")), now=NOW)
    (problem,) = schedule.problems
    assert why in problem
    assert len(spans(schedule, "org/good")) == 1


def test_bad_events_do_not_affect_good_ones() -> None:
    events = [
        once(uid="a", summary="org/a"),
        "BEGIN:VEVENT\r\nthis is no line of a calendar\r\n;;;=\r\nEND:VEVENT",
        once('X-THING;A="b:c', uid="b", summary="org/b"),
        "BEGIN:VTODO\r\nSUMMARY:org/todo\r\nnonsense\r\nEND:VTODO",
        once("BEGIN:VALARM", "TRIGGER:never", "END:VALARM", uid="c", summary="org/c"),
        event("DTSTART:x", uid="d", summary="Anna\\, again"),
    ]
    broken_zone = "BEGIN:VTIMEZONE\r\nTZID:Broken\r\nEND:VTIMEZONE"
    schedule = read(calendar(broken_zone, *events), now=NOW)
    assert [window.config.repo_id for window in schedule.windows(*YEAR)] == [
        "org/a",
        "org/b",
        "org/c",
    ]
    assert schedule.problems[1:] == (
        "The event 'Anna, again' of x has a DTSTART that is no date: 'x'.",
    )
    assert schedule.problems[0].startswith("The event '' ")


@pytest.mark.parametrize(
    "line",
    [
        "RDATE;VALUE=PERIOD:20261006T090000Z/20251006T090000Z",
        "DTSTART;VALUE=PERIOD:20261006T090000Z/20251006T090000Z",
        "CATEGORIES;VALUE=FLOAT:three",
        "DURATION:P99999999999999D",
    ],
)
def test_line_that_library_cannot_parse_does_not_affect_other_event(line: str) -> None:
    schedule = read(calendar(once(line), once(uid="good", summary="org/good")), now=NOW)
    assert len(spans(schedule, "org/good")) == 1


# Conflicts


def test_later_event_wins_conflict() -> None:
    text = calendar(
        event("DTSTART:20261005T080000Z", "DTEND:20261005T180000Z", "DESCRIPTION:replicas: 2"),
        event(
            "DTSTART:20261005T100000Z",
            "DTEND:20261005T120000Z",
            "DESCRIPTION:repo_id: ORG/model\\nreplicas: 5\\ndtype: float16",
            uid="two",
            summary="Course",
        ),
    )
    schedule = read(text, now=NOW)
    assert [
        (window.start.hour, window.end.hour, window.config.replicas)
        for window in schedule.windows(*YEAR)
    ] == [(8, 10, 2), (10, 12, 5), (12, 18, 2)]
    (problem,) = schedule.problems
    assert problem == (
        "ORG/model is scheduled with different repo_id and checkpoint and dtype and replicas at the "
        "same time, 2026-10-05 10:00 UTC, by 'org/model' of 2026-10-05 and by 'Course' of "
        "2026-10-05: the event that starts later applies."
    )


def test_conflict_of_two_series_is_reported_once() -> None:
    other = once("RRULE:FREQ=DAILY", "DESCRIPTION:replicas: 2", uid="two")
    schedule = read(calendar(once("RRULE:FREQ=DAILY"), other), now=NOW)
    assert len(schedule.problems) == 1
    # The winner does not depend on the order in the file.
    again = read(calendar(other, once("RRULE:FREQ=DAILY")), now=NOW)
    assert again.timelines == schedule.timelines


def test_equal_overlapping_events_are_no_conflict() -> None:
    longer = once(uid="two").replace("T100000", "T110000")
    schedule = read(calendar(once(), longer), now=NOW)
    assert schedule.problems == ()
    assert [(a.hour, b.hour) for a, b in spans(schedule)] == [(7, 9)]


def test_two_revisions_are_scheduled_as_two_models() -> None:
    other = once("DESCRIPTION:revision: v2", uid="two")
    schedule = read(calendar(once(), other), now=NOW)
    assert schedule.problems == ()
    assert {window.config.revision for window in schedule.windows(*YEAR)} == {None, "v2"}
