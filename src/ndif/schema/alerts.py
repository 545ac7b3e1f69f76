"""Alerts as operators and programs see them: incidents and their recipients."""

from __future__ import annotations

from typing import Literal

from ndif.schema.answer import answer

_SOME_TIME = 1_785_000_000.0

Severity = Literal["critical", "warning"]
Form = Literal["slack", "discord", "json", "email"]


@answer()
class AlertCause:
    """A present or past problem. Times are Unix seconds."""

    kind: str
    """Kind of the problem, such as `no-replica`."""
    subject: str
    """The model, node, GPU, store, disk or calendar that has the problem."""
    sentence: str
    since: float
    over: float | None
    """Unix time at which the problem ended; null while it persists."""


@answer()
class AlertIncident:
    """Related problems that are reported together until all of them end. Times are Unix seconds."""

    id: str
    kind: str
    severity: Severity
    opened: float
    resolved: float | None
    """Null while any of its causes persists."""
    causes: list[AlertCause]


@answer()
class AlertDestination:
    """A webhook or mailbox that gets alerts."""

    to: str
    """Address without its secrets."""
    form: Form
    waiting: int
    """Number of messages that are not delivered yet."""
    problem: str | None
    """Reason why the last delivery failed; null if it did not fail."""


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
                        "sentence": "The broker does not answer: new jobs are refused, and "
                        "running jobs continue.",
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
    """Open incidents, incidents resolved during the last day, and recipients."""

    open: list[AlertIncident]
    resolved: list[AlertIncident]
    """Newest first."""
    destinations: list[AlertDestination]


@answer()
class TestedAlertDestination:
    """The outcome of a test message to one destination."""

    to: str
    form: Form
    problem: str | None
    """Null if the destination accepted the message."""


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
