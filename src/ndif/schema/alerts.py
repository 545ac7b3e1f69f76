"""Alerts as operators and programs see them: incidents, and who is told."""

from __future__ import annotations

from typing import Literal

from ndif.schema.answer import answer

_SOME_TIME = 1_785_000_000.0

Severity = Literal["critical", "warning"]
Form = Literal["slack", "discord", "json", "email"]


@answer()
class AlertCause:
    """One thing that is or was wrong."""

    kind: str
    """Kind of the cause, as `no-replica`."""
    subject: str
    """The model, machine, GPU or store that it is about."""
    sentence: str
    since: float
    over: float | None
    """Unix time from which it is no longer so; null while it is."""


@answer()
class AlertIncident:
    """Causes that are told together, from the first message to the one that says they are over."""

    id: str
    kind: str
    severity: Severity
    opened: float
    resolved: float | None
    """Null while a cause of it holds."""
    causes: list[AlertCause]


@answer()
class AlertDestination:
    """A webhook or mailbox that gets alerts."""

    to: str
    """Address without what is secret in it."""
    form: Form
    waiting: int
    """Number of messages that it was not brought yet."""
    problem: str | None
    """Reason for which the last attempt failed; null if it did not."""


@answer(
    example={
        "open": [
            {
                "id": "1f3a09c2",
                "kind": "store-away",
                "severity": "critical",
                "opened": _SOME_TIME,
                "resolved": None,
                "causes": [
                    {
                        "kind": "store-away",
                        "subject": "broker",
                        "sentence": "The broker does not answer: jobs are refused, and those "
                        "that run go on.",
                        "since": _SOME_TIME - 60,
                        "over": None,
                    }
                ],
            }
        ],
        "resolved": [],
        "destinations": [
            {
                "to": "https://hooks.slack.com/…",
                "form": "slack",
                "waiting": 0,
                "problem": None,
            }
        ],
    }
)
class Alerts:
    """Incidents that are open, those of the last day that are over, and who is told."""

    open: list[AlertIncident]
    resolved: list[AlertIncident]
    """The last first."""
    destinations: list[AlertDestination]


@answer()
class TestedAlertDestination:
    """The outcome of a test message to one destination."""

    to: str
    form: Form
    problem: str | None
    """Null if it took the message."""


@answer(
    example={
        "destinations": [
            {"to": "https://hooks.slack.com/…", "form": "slack", "problem": None},
            {
                "to": "o…@example.org",
                "form": "email",
                "problem": "the mail server answered 451",
            },
        ]
    }
)
class TestedAlerts:
    """The outcome of a test message to each destination."""

    destinations: list[TestedAlertDestination]
