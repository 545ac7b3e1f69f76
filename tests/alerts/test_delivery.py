"""Delivery of alerts to real web and mail servers; some servers hang, refuse or are unavailable."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from email import message_from_bytes
from email.policy import default as by_default
from typing import Any

import pytest

from ndif.alerts import delivery
from ndif.alerts.delivery import POLICY, AlertDelivery, form_and_url, open_destinations
from ndif.alerts.incidents import IncidentEvent
from ndif.alerts.messages import Message, digest_message
from ndif.alerts.messages import test_message as a_test
from ndif.config.reference import variables
from ndif.config.settings import Settings
from ndif.delivery.loop import Policy
from ndif.runtime.typed_json import from_json, to_json
from ndif.schema.server_state import ProblemKind as Kind
from ndif.tasks import end
from tests.alerts.receivers import HANGS, Receiver, receiving
from tests.alerts.test_messages import (
    message,
    of_the_schema,
    within_the_limits_of_discord,
    within_the_limits_of_slack,
)
from tests.delivery.test_mail import Post, mail_server
from tests.on_loop import on_loop
from tests.services.process import free_port
from tests.waiting import eventually


def fresh(*sentences: str, **options: Any) -> Message:
    """Return a message dated now."""
    return replace(message(*sentences, **options), at=time.time())


def opened(*webhooks: str, policy: Policy = POLICY, **values: Any) -> AlertDelivery:
    settings = Settings(alert_webhooks=",".join(webhooks), **values)
    return AlertDelivery(open_destinations(settings), policy=policy)


@pytest.mark.parametrize(
    ("address", "form", "url"),
    [
        (
            "https://hooks.slack.com/services/T/B/x",
            "slack",
            "https://hooks.slack.com/services/T/B/x",
        ),
        ("https://discord.com/api/webhooks/1/x", "discord", "https://discord.com/api/webhooks/1/x"),
        ("https://canary.discord.com/api/webhooks/1/x", "discord", ...),
        ("https://discordapp.com/api/webhooks/1/x", "discord", ...),
        ("https://ops.example.org/a+b", "json", "https://ops.example.org/a+b"),
        ("slack+https://mattermost.example/hooks/x", "slack", "https://mattermost.example/hooks/x"),
        ("discord+http://127.0.0.1:1/x", "discord", "http://127.0.0.1:1/x"),
        ("json+https://hooks.slack.com/x", "json", "https://hooks.slack.com/x"),
        ("https://hooks.slack.com.evil.example/x", "json", ...),
        ("https://notdiscord.com/api/webhooks/1", "json", ...),
    ],
)
def test_message_form_follows_from_prefix_or_host(address: str, form: str, url: Any) -> None:
    assert form_and_url(address) == (form, address if url is ... else url)


@on_loop
async def test_each_form_is_delivered_within_its_limits() -> None:
    with receiving() as slack, receiving() as discord, receiving() as plain:
        alerts = opened(f"slack+{slack.url}", f"discord+{discord.url}", plain.url)
        running = asyncio.create_task(alerts.run())
        long = [fresh(*(f"{n} <@everyone> *fails* & " * 30 for n in range(40)))]
        for sent in (*long, fresh("x", event=IncidentEvent.RESOLVED), a_test("here", time.time())):
            alerts.send(sent)
        receivers = (slack, discord, plain)
        await eventually(lambda: all(len(receiver.taken) == 3 for receiver in receivers))
        await end([running])
    for body in slack.taken:
        within_the_limits_of_slack(body)
    for body in discord.taken:
        within_the_limits_of_discord(body)
    for body in plain.taken:
        of_the_schema(body)
    assert [body["event"] for body in plain.taken] == ["opened", "resolved", "test"]


@on_loop
async def test_mail_delivers_alert_and_digest_to_all_recipients() -> None:
    post = Post()
    with mail_server(post) as port:
        alerts = opened(
            policy=replace(POLICY, first_s=0.1),  # soon, in case this machine stalls
            smtp_url=f"smtp://127.0.0.1:{port}",
            mail_from="ndif@example.org",
            alert_email="ada@example.org, ops@example.org",
        )
        running = asyncio.create_task(alerts.run())
        alerts.send(fresh("org/ä has no files.", kind=Kind.NO_REPLICA))
        alerts.send(digest_message("here", time.time(), ["Jobs: none ended."]))
        await eventually(lambda: len(post.received) >= 4)
        await end([running])
    assert {to for envelope in post.received for to in envelope.rcpt_tos} == {
        *("ada@example.org", "ops@example.org")
    }
    mails = [message_from_bytes(mail.content, policy=by_default) for mail in post.received]  # type: ignore[arg-type]
    subjects = sorted({str(mail["Subject"]) for mail in mails})
    assert subjects == ["A model has no replica: org/a", "The last day"]
    texts = "\n".join(mail.get_content() for mail in mails)
    assert "• org/ä has no files." in texts
    assert "Jobs: none ended." in texts
    assert len({mail["Message-ID"] for mail in mails}) == 2


@on_loop
async def test_failing_destination_does_not_delay_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_TIMEOUT_S", 5)
    away = Receiver(port=free_port())
    with receiving() as hangs, receiving() as fails, receiving() as well:
        hangs.status, fails.status = HANGS, 500
        quick = replace(POLICY, first_s=0.1, factor=1.0)
        alerts = opened(hangs.url, fails.url, away.url, well.url, policy=quick)
        running = asyncio.create_task(alerts.run())
        began = time.monotonic()
        for number in range(5):
            alerts.send(fresh(f"{number} fails."))
        assert time.monotonic() - began < delivery._TIMEOUT_S
        await eventually(lambda: len(well.taken) == 5)
        assert not hangs.taken
        await eventually(lambda: fails.asked > 2 and hangs.asked > 1)
        # Each destination gets its messages in order once it recovers.
        hangs.status, fails.status = 200, 204
        hangs.released.set()
        with receiving(away.port) as back:
            await eventually(lambda: all(len(r.taken) == 5 for r in (hangs, fails, back)))
            for receiver in (hangs, fails, back):
                sentences = [body["incident"]["causes"][0]["sentence"] for body in receiver.taken]
                assert sentences == [f"{number} fails." for number in range(5)]
        await end([running])
    sentences = [record.getMessage() for record in caplog.records if record.name.startswith("ndif")]
    # The log has one line when a destination fails and one when it recovers, without secrets.
    failing = [line for line in sentences if "do not reach" in line]
    assert len(failing) == 3
    assert len([line for line in sentences if "again" in line]) == 3
    assert "secret" not in "\n".join(sentences)
    assert f"http://127.0.0.1:{fails.port}/…: it answered 500" in "\n".join(failing)


@on_loop
async def test_refused_message_does_not_block_next_message() -> None:
    with receiving() as receiver:
        receiver.status = 400
        alerts = opened(receiver.url)
        running = asyncio.create_task(alerts.run())
        alerts.send(fresh("a"))
        await eventually(lambda: receiver.asked == 1)
        receiver.status = 200
        alerts.send(fresh("b"))
        await eventually(lambda: receiver.taken)
        await end([running])
    assert [body["incident"]["causes"][0]["sentence"] for body in receiver.taken] == ["b"]


@on_loop
async def test_retry_after_header_delays_next_attempt() -> None:
    with receiving() as receiver:
        receiver.status, receiver.headers = 429, {"Retry-After": "0.7"}
        receiver.later_status = 200
        alerts = opened(receiver.url, policy=replace(POLICY, first_s=0.01))
        running = asyncio.create_task(alerts.run())
        began = time.monotonic()
        alerts.send(fresh("a"))
        await eventually(lambda: receiver.taken)
        await end([running])
    assert receiver.arrived[0] - began > 0.6
    assert receiver.asked == 2


@on_loop
async def test_pending_messages_are_bounded_and_survive_restart() -> None:
    port = free_port()
    alerts = opened(Receiver(port=port).url)
    for number in range(150):
        alerts.send(fresh(str(number)))
    saved = from_json(dict[str, tuple[Message, ...]], to_json(alerts.waiting()))
    assert not any("secret" in name for name in saved)
    (waiting,) = saved.values()
    assert len(waiting) == 100
    with receiving(port) as receiver:
        other = opened(receiver.url)
        other.take(saved)
        running = asyncio.create_task(other.run())
        await eventually(lambda: len(receiver.taken) == 100 and not other.waiting())
        await end([running])
    first = receiver.taken[0]["incident"]["causes"][0]["sentence"]
    assert first == "50"
    # Another destination does not receive these messages.
    elsewhere = opened("https://elsewhere.example/x")
    elsewhere.take(saved)
    assert elsewhere.waiting() == {}


@on_loop
async def test_day_old_message_is_dropped() -> None:
    with receiving() as receiver:
        alerts = opened(receiver.url)
        alerts.send(replace(fresh("old"), at=time.time() - 25 * 3600))
        alerts.send(fresh("new"))
        running = asyncio.create_task(alerts.run())
        await eventually(lambda: receiver.taken)
        await end([running])
    assert [body["incident"]["causes"][0]["sentence"] for body in receiver.taken] == ["new"]


@on_loop
async def test_alert_test_reports_answer_of_each_destination() -> None:
    with receiving() as well, receiving() as fails:
        fails.status = 403
        alerts = opened(f"slack+{well.url}", fails.url, Receiver(port=free_port()).url)
        answers = await alerts.try_each(a_test("here", time.time()))
    assert [(answer.form, answer.problem) for answer in answers] == [
        ("slack", None),
        ("json", "it answered 403"),
        ("json", "it cannot be reached"),
    ]
    assert "secret" not in str(answers)
    assert "Test" in well.taken[0]["text"]


def test_printed_configuration_contains_no_webhook_secret() -> None:
    options = Settings(alert_webhooks="https://hooks.slack.com/services/a-secret")  # type: ignore[arg-type]
    assert "secret" not in str([variable.value for variable in variables(options)])
