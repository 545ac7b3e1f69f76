"""The audit events of changing operations."""

from __future__ import annotations

from typing import Any

import pytest

from ndif.control.account_operations import ACCOUNT_OPERATIONS, AccountOperation
from ndif.control.audit_events import events_of
from ndif.control.operations import OPERATIONS, Deploy, Evict, Operation, Scale, parse_operation
from ndif.gateway.openapi import example_of
from ndif.schema.answer import from_plain
from ndif.schema.model_key import ModelKey, Variant

READ = {
    "status",
    "queue",
    "export",
    "jobs",
    "trace",
    "usage",
    "cache",
    "callbacks",
    "alerts",
    "events",
}
READ |= {"keys", "keys/show", "tiers", "users", "users/show"}


def answer_of(kind: type[Operation | AccountOperation], plain: Any) -> Any:
    return from_plain(kind.answer, plain)


def events_for(
    kind: type[Operation | AccountOperation], **fields: Any
) -> list[tuple[str, str, str]]:
    example = example_of(kind) if kind.model_fields else {}
    operation = parse_operation(kind, {**example, **fields})
    events = events_of(operation, answer_of(kind, example_of(kind.answer)), "token", 1.0)
    assert all((event.at, event.by, event.count) == (1.0, "token", 1) for event in events)
    return [(event.kind, event.subject, event.text) for event in events]


@pytest.mark.parametrize("kind", [*OPERATIONS, *ACCOUNT_OPERATIONS], ids=lambda kind: kind.name)
def test_only_changing_operations_emit_events(kind: type[Operation]) -> None:
    fields = {"dry_run": False} if kind.name == "gc" else {}
    events = events_for(kind, **fields)
    assert bool(events) == (kind.name not in READ)
    for _, subject, text in events:
        assert subject
        assert "ndif_" not in subject + text  # no key


def test_dry_run_emits_no_event() -> None:
    (collect,) = (kind for kind in OPERATIONS if kind.name == "gc")
    assert events_for(collect, dry_run=True) == []


def test_event_subject_is_model_name() -> None:
    named = {kind.name: kind for kind in OPERATIONS}
    for name in ("deploy", "evict", "scale", "restart"):
        assert events_for(named[name])[0][1] == "openai-community/gpt2"


def test_event_text_of_failed_operation_reports_failure() -> None:
    outcome = {"repo_id": "a/b", "generation": "0.8", "replicas": [], "evicted": []}
    deploy = parse_operation(Deploy, {"deployments": [{"repo_id": "a/b"}]})
    answer = answer_of(Deploy, {"models": [{**outcome, "problem": "It is broken."}]})
    (event,) = events_of(deploy, answer, "token", 1.0)
    assert event.text == "Failed for nnsight 0.8: It is broken."
    evict = parse_operation(Evict, {"model": "a/b"})
    evicted_row = {"model_key": "a/b", "replica_id": None}
    (event,) = events_of(evict, answer_of(Evict, {"evicted": [evicted_row]}), "token", 1.0)
    assert event.text == "It had no replica."
    answer = answer_of(Evict, {"evicted": [evicted_row, {**evicted_row, "replica_id": "r1"}]})
    (event,) = events_of(evict, answer, "token", 1.0)
    assert event.text == "1 replica off the devices."


def test_scale_event_names_evicted_models() -> None:
    def key(repo_id: str, generation: str) -> str:
        return str(Variant(ModelKey("a.B", repo_id), generation))

    keys = [key("a/b", "0.8"), key("a/b", "0.7"), key("c/d", "0.8")]
    evicted = [{"model": key, "replica_id": "r1"} for key in keys]
    outcome = {"repo_id": "a/b", "generation": "0.8", "replicas": [], "problem": None}
    scale = parse_operation(Scale, {"model": "a/b", "replicas": 0})
    answer = answer_of(Scale, {"models": [{**outcome, "evicted": evicted}]})
    events = events_of(scale, answer, "token", 1.0)
    assert [(event.kind, event.subject, event.text) for event in events] == [
        ("scaled", "a/b", "0 replicas for nnsight 0.8."),
        ("evicted", "a/b", "Its memory went to a/b."),
        ("evicted", "c/d", "Its memory went to a/b."),
    ]
