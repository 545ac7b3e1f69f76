"""Work of a client of any generation with the keys of several tiers: it exceeds each limit, and reads why.

TEST_KEYS is a JSON object of the keys by tier; TEST_REVOKE the command that revokes the key of `revoked`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import httpx
import nnsight
import torch
import websocket
from comparing import PATIENCE_S, raised, until
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend

PROMPT = "The Eiffel Tower is in the city of"
KEYS: dict[str, str] = json.loads(os.environ["TEST_KEYS"])
URL = os.environ["NDIF_HOST"]
LONG_S = 600.0
"""Seconds of a job that is ended before its end."""


class Context:
    """A model that is on the server alone."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        self.is_older = not hasattr(nnsight, "TransformersModel")
        kind = nnsight.LanguageModel if self.is_older else nnsight.TransformersModel
        options = {} if self.is_older else {"task": "text-generation"}
        self.remote = kind(name, **options)

    def of(self, tier: str) -> Context:
        """The same model, asked with the key of a tier."""
        CONFIG.API.APIKEY = KEYS[tier]
        return self

    def trace(self, seconds: float = 0.0, numbers: int = 0) -> Any:
        """The result of a live block that runs so long, and saves so many numbers beside."""
        with self.remote.trace(PROMPT, remote=True):
            first = self.remote.transformer.h[0].output.save()
            beside = torch.rand(numbers).save()
            time.sleep(seconds)
        return first, beside

    def send(self, seconds: float, numbers: int = 0) -> RemoteBackend:
        """A job that is polled for."""
        backend = RemoteBackend(self.remote.to_model_key(), blocking=False)
        with self.remote.trace(PROMPT, backend=backend):
            beside = torch.rand(numbers).save()
            self.remote.transformer.h[0].output.save()
            time.sleep(seconds)
        return backend


def said(run: Callable[[], Any]) -> str:
    """The words of the refusal that `run` must raise."""
    message = str(raised(run, Exception))
    assert "ndif/" not in message, message
    return message


def refusal_of(run: Callable[[], Any]) -> str | None:
    """The words of the refusal of `run`; None if it is not refused."""
    try:
        run()
    except Exception as error:
        return str(error)
    return None


def scenario_two_keys_of_two_tiers(context: Context) -> None:
    for tier, tags in (("free", ["priority"]), ("last", [])):
        context.of(tier).trace()
        answer = httpx.get(f"{URL}/whoami", headers={"ndif-api-key": KEYS[tier]}).json()
        assert answer["email"].startswith(tier), answer
        assert answer["tags"] == tags, answer


def scenario_a_wrong_key(context: Context) -> None:
    right = CONFIG.API.HOST
    for host in (right, f"{right}/"):
        CONFIG.API.HOST, CONFIG.API.APIKEY = host, "no-key-of-this-server"
        message = said(context.trace)
        assert "This server does not know the API key" in message, message
        assert "Handshake" not in message, message
    context.of("free").trace()
    CONFIG.API.HOST = right


def scenario_requests_a_minute(context: Context) -> None:
    context.of("brisk")

    def run() -> None:
        for _ in range(4):
            context.trace()

    message = said(run)
    assert "3 requests a minute" in message, message
    context.of("free").trace()


def scenario_unfinished_jobs(context: Context) -> None:
    jobs = [context.of("small").send(seconds) for seconds in (LONG_S, 0)]
    try:
        message = said(context.trace)
        assert "may have 2 jobs that wait or run at once" in message, message
    finally:
        for each in jobs:
            answer = httpx.delete(
                f"{URL}/request/{each.job_id}", headers={"ndif-api-key": KEYS["small"]}
            )
            assert answer.status_code == 200, answer.text
    context.trace()


def scenario_the_queue_of_a_model(context: Context) -> None:
    job = context.of("free").send(LONG_S)
    try:
        message = said(context.of("last").trace)
        assert "of all its users together" in message, message
    finally:
        httpx.delete(f"{URL}/request/{job.job_id}", headers={"ndif-api-key": KEYS["free"]})
    context.trace()


def scenario_the_size_of_a_request(context: Context) -> None:
    context.of("small")
    large = torch.rand(100_000)

    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            (context.remote.transformer.h[0].output[0] + large.sum()).save()

    message = said(run)
    assert "your API key may send" in message, message


def scenario_the_size_of_a_result(context: Context) -> None:
    message = said(lambda: context.of("small").trace(numbers=100_000))
    assert "more than 200kB" in message, message
    context.trace(numbers=1000)


def scenario_the_size_of_stored_results(context: Context) -> None:
    jobs = [context.of("store").send(0, numbers=30_000) for _ in range(3)]
    message = said(lambda: [until(each) for each in jobs])
    assert "of at most 300kB, which is your limit" in message, message


def scenario_channels(context: Context) -> None:
    if context.is_older:  # which opens them without its key
        return
    held = websocket.create_connection(
        f"ws{URL[4:]}/subscribe", header={"ndif-api-key": KEYS["channel"]}, timeout=PATIENCE_S
    )
    message = said(context.of("channel").trace)
    assert message.startswith("Failed to send request: Your API key may have one live ch"), message
    held.close()

    until(lambda: refusal_of(context.trace) is None)


def scenario_seconds_a_day(context: Context) -> None:
    """The block takes more than a second; the sum is asked for every ten seconds."""
    context.of("spent").trace(seconds=1.2)
    message = until(lambda: refusal_of(context.trace))
    assert "ndif/" not in message, message
    assert "and may run 1s a day" in message, message


def scenario_a_key_that_is_revoked_while_its_client_waits(context: Context) -> None:
    polled = context.of("revoked").send(LONG_S)
    soon = ["sh", "-c", f"sleep 1; {os.environ['TEST_REVOKE']}"]
    with subprocess.Popen(soon, stdout=subprocess.DEVNULL) as revoking:
        began = time.monotonic()
        message = said(context.trace)  # it waits behind the other
        assert time.monotonic() - began < LONG_S / 2
    assert revoking.returncode == 0
    assert "its API key was revoked" in message, message
    ended = until(
        lambda: [
            each
            for each in httpx.get(f"{URL}/requests", headers={"ndif-api-key": KEYS["heir"]}).json()[
                "requests"
            ]
            if each["id"] == polled.job_id and each["ended"]
        ]
    )
    assert ended[0]["status"] == "CANCELLED"
    assert "its API key was revoked" in ended[0]["reason"]

    until(lambda: "This API key was revoked" in (refusal_of(context.trace) or ""))
