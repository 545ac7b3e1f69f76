"""Alerts of a real server: a real failure is reported, and so is its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from email import message_from_bytes
from email.policy import default as policy
from pathlib import Path
from typing import Any

import pytest

from ndif.alerts.watch import SavedAlerts
from ndif.schema.alerts import Alerts as AlertsAnswer
from ndif.schema.alerts import TestedAlerts as AnswerOfTest
from ndif.schema.answer import from_plain
from ndif.stores.broker.signing import Signer
from ndif.stores.leader import SharedCache
from ndif.stores.persisted_state import ALERTS, SharedState
from ndif.stores.redis import connect
from tests.alerts.receivers import Receiver, receiving
from tests.alerts.test_messages import (
    of_the_schema,
    within_the_limits_of_discord,
    within_the_limits_of_slack,
)
from tests.clients.harness import StartedServer
from tests.commands import NDIF, ndif
from tests.delivery.test_mail import Post, mail_server
from tests.server.test_callbacks import processes_of
from tests.services.redis import RedisServer
from tests.tiny_models import make_gpt2
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECRETS = ("a-secret", "another-secret")
CLUSTER_SECRET = "a secret that the processes share"


class Operator:
    """A server, its operator's webhook for JSON, and the operator's commands."""

    def __init__(self, receiver: Receiver, environment: dict[str, str], *webhooks: str) -> None:
        self.receiver = receiver
        self.environment = {
            **environment,
            "NDIF_ALERT_WEBHOOKS": ", ".join((receiver.url, *webhooks)),
            "NDIF_ALERT_AFTER_S": "1",
            "NDIF_CONTROLLER_SYNC_INTERVAL_S": "2",
        }
        self.server = StartedServer(environment=self.environment).ready()
        self.seen = 0

    def ndif(self, *arguments: str, code: int = 0) -> str:
        variables = {**os.environ, **self.environment, "NO_COLOR": "1"}
        process = ndif(*arguments, environment=variables)
        assert process.returncode == code, process.stdout + process.stderr
        return process.stdout

    def until_webhook(self, event: str, kind: str) -> dict[str, Any]:
        """Wait for a message about a kind."""

        def matching() -> list[dict[str, Any]]:
            return [
                body
                for body in self.receiver.taken
                if body["event"] == event and body["incident"] and body["incident"]["kind"] == kind
            ]

        return until(matching, lambda: str(self.receiver.taken))[-1]


def killed(running: Callable[[], set[int]]) -> int:
    """Kill the only running process and return its id; retry if the process ended by itself."""
    deaths: list[int] = []

    def is_killed() -> bool:
        for process in running():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
            deaths.append(process)
        return bool(deaths)

    until(is_killed)
    (death,) = deaths
    return death


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """The operator's web server."""
    with receiving() as webhook:
        yield webhook


def broken(folder: Path) -> tuple[Path, bytes]:
    """Return a checkpoint with an unreadable tokenizer, and the tokenizer's right content."""
    model_folder = make_gpt2(folder / "broken")
    file = model_folder / "tokenizer.json"
    right = file.read_bytes()
    file.write_text("{")
    return model_folder, right


def test_server_reports_unloadable_model_and_sends_daily_digest(
    server_environment: dict[str, str], receiver: Receiver, tmp_path: Path
) -> None:
    files, right = broken(tmp_path)
    post = Post()
    digest_at = datetime.now() + timedelta(seconds=140)
    with receiving() as slack, receiving() as discord, mail_server(post) as port:
        environment = {
            **server_environment,
            "NDIF_SESSION_ROOT": str(tmp_path / "sessions"),
            "NDIF_SMTP_URL": f"smtp://127.0.0.1:{port}",
            "NDIF_MAIL_FROM": "ndif@example.org",
            "NDIF_ALERT_EMAIL": "ops@example.org",
            "NDIF_ALERT_DIGEST_AT": f"{digest_at:%H:%M}",
        }
        operator = Operator(receiver, environment, f"slack+{slack.url}", f"discord+{discord.url}")
        try:
            tested = operator.ndif("alerts", "test", "--json")
            assert len(from_plain(AnswerOfTest, json.loads(tested)).destinations) == 4
            output = operator.ndif("alerts", "test")
            assert output.count("delivered") == 4, output
            until(lambda: post.received)
            operator.ndif("deploy", f"tests/broken={files}", "--dedicated", code=1)
            opened = operator.until_webhook("opened", "load-failed")
            assert "tests/broken" in opened["headline"]
            (_cause,) = opened["incident"]["causes"]
            listed = from_plain(AlertsAnswer, json.loads(operator.ndif("alerts", "list", "--json")))
            assert [incident.id for incident in listed.open] == [opened["incident"]["id"]]
            assert "load-failed" in operator.ndif("alerts", "list")
            # Repeated loads belong to one incident.
            (files / "tokenizer.json").write_bytes(right)
            operator.ndif("deploy", f"tests/broken={files}", "--dedicated")
            resolved = operator.until_webhook("resolved", "load-failed")
            assert resolved["incident"]["id"] == opened["incident"]["id"]
            # Kill the model's process three times.
            for _ in range(3):
                process = killed(operator.server.processes)
                until(lambda ended=process: operator.server.processes() - {ended})
                operator.ndif("deploy", f"tests/broken={files}", "--dedicated")
            lost = operator.until_webhook("opened", "replicas-lost")
            assert "3 processes of tests/broken ended" in lost["text"]
            until(lambda: [body for body in receiver.taken if body["event"] == "digest"])
            digest = next(body for body in receiver.taken if body["event"] == "digest")
            for text in ("Jobs: none ended.", "Incidents: ", "Disk of results: "):
                assert text in digest["text"]
            until(lambda: len(post.received) >= len(receiver.taken))
            listed = from_plain(AlertsAnswer, json.loads(operator.ndif("alerts", "list", "--json")))
            assert opened["incident"]["id"] in [incident.id for incident in listed.resolved]
            output = operator.ndif("info", "--config") + operator.ndif("logs", "api")
            assert not [secret for secret in SECRETS if secret in output]
        finally:
            operator.server.stop()
    assert not [s for s in SECRETS if s in "\n".join(operator.server.output)]
    events = [body["event"] for body in receiver.taken]
    assert events.count("digest") == 1
    assert len(slack.taken) == len(discord.taken) == len(receiver.taken)
    for body in slack.taken:
        within_the_limits_of_slack(body)
    for body in discord.taken:
        within_the_limits_of_discord(body)
    for body in receiver.taken:
        of_the_schema(body)
    mails = [message_from_bytes(mail.content, policy=policy) for mail in post.received]  # type: ignore[arg-type]
    subjects = [str(mail["Subject"]) for mail in mails]
    for subject in ("A model could not be loaded: tests/broken", "Resolved: ", "The last day"):
        assert any(text.startswith(subject) for text in subjects), subjects


def test_server_reports_broker_outage_and_next_leader_resolves_incident(
    server_environment: dict[str, str], receiver: Receiver, tmp_path: Path, redis: RedisServer
) -> None:
    redis.command("flushall")
    files, right = broken(tmp_path)
    environment = {
        **server_environment,
        "NDIF_SESSION_ROOT": str(tmp_path / "sessions"),
        "NDIF_BROKER_URL": redis.url,
        "NDIF_CLUSTER_SECRET": CLUSTER_SECRET,
    }
    operator = Operator(receiver, environment)
    try:
        until(lambda: "delivered" in ready(operator))
        redis.pause()
        opened = operator.until_webhook("opened", "store-away")
        causes = [cause["subject"] for cause in opened["incident"]["causes"]]
        assert "broker" in causes
        redis.resume()
        resolved = operator.until_webhook("resolved", "store-away")
        assert resolved["incident"]["id"] == opened["incident"]["id"]
        operator.ndif("deploy", f"tests/broken={files}", "--dedicated", code=1)
        opened = operator.until_webhook("opened", "load-failed")
        # Redis holds the open incident and no unsent message for the next leader.
        until(lambda: (state := saved(redis)).incidents.open and not state.messages)

        def leaders() -> set[int]:
            return set(processes_of(operator.server.process.pid, "ndif.server.leader"))

        leader = killed(leaders)
        until(lambda: leaders() - {leader})
        (files / "tokenizer.json").write_bytes(right)
        until(lambda: "delivered" in ready(operator))
        operator.ndif("deploy", f"tests/broken={files}", "--dedicated")
        resolved = operator.until_webhook("resolved", "load-failed")
        assert resolved["incident"]["id"] == opened["incident"]["id"]
        notices = [
            (body["event"], body["incident"]["kind"], body["incident"]["id"])
            for body in receiver.taken
            if body["incident"]
        ]
        # Each incident is opened once and resolved once, although the leader changed.
        assert len(notices) == 4, (notices, [body["text"] for body in receiver.taken])
        assert len({incident for _, _, incident in notices}) == 2
    finally:
        redis.resume()
        operator.server.stop()


def saved(redis: RedisServer) -> SavedAlerts:
    """Return the state of alerts that the next leader would load."""

    async def load() -> SavedAlerts | None:
        client = connect(redis.url)
        try:
            cache = SharedCache(client, Signer([CLUSTER_SECRET]))
            return await SharedState(cache, ALERTS, SavedAlerts).load()
        finally:
            await client.aclose()

    state = asyncio.run(load())
    assert state is not None
    return state


def ready(operator: Operator) -> str:
    """Return the output of `ndif alerts test`; empty without a leader."""
    variables = {**os.environ, **operator.environment}
    return ndif("alerts", "test", environment=variables).stdout


def test_server_without_alert_settings_does_not_import_alerts(
    server_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {**server_environment, "NDIF_SESSION_ROOT": str(tmp_path / "sessions")}
    server = StartedServer(environment=environment).ready()
    try:
        variables = {**os.environ, **environment}
        process = subprocess.run(
            [NDIF, "alerts", "list"], env=variables, capture_output=True, text=True
        )
        assert process.returncode != 0
        assert "set NDIF_ALERT_WEBHOOKS or NDIF_ALERT_EMAIL" in process.stderr
        probe = "import sys, ndif.server.embedded, ndif.server.leader; print('ndif.alerts' in sys.modules)"
        import_run = subprocess.run(
            [Path(NDIF).with_name("python"), "-c", probe], capture_output=True, text=True
        )
        assert import_run.stdout == "False\n"
    finally:
        server.stop()
