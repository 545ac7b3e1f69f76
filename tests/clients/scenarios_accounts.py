"""A client of any generation with the keys of several tiers exceeds each limit, and reads the message.

TEST_KEYS is a JSON object of keys by tier; TEST_REVOKE is the command that revokes the key of `revoked`.
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
"""Seconds of a job that a test ends early."""


class Context:
    """A model of the server, without weights in this process."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        self.is_older = not hasattr(nnsight, "TransformersModel")
        kind = nnsight.LanguageModel if self.is_older else nnsight.TransformersModel
        options = {} if self.is_older else {"task": "text-generation"}
        self.remote = kind(name, **options)

    def of(self, tier: str) -> Context:
        """Use the key of a tier from now on; return this context."""
        CONFIG.API.APIKEY = KEYS[tier]
        return self

    def trace(self, seconds: float = 0.0, numbers: int = 0) -> Any:
        """Return the result of a live block that runs for `seconds`, and saves `numbers` random numbers."""
        with self.remote.trace(PROMPT, remote=True):
            first = self.remote.transformer.h[0].output.save()
            beside = torch.rand(numbers).save()
            time.sleep(seconds)
        return first, beside

    def send(self, seconds: float, numbers: int = 0) -> RemoteBackend:
        """Send a job that is polled."""
        backend = RemoteBackend(self.remote.to_model_key(), blocking=False)
        with self.remote.trace(PROMPT, backend=backend):
            beside = torch.rand(numbers).save()
            self.remote.transformer.h[0].output.save()
            time.sleep(seconds)
        return backend


def error_of(run: Callable[[], Any]) -> str:
    """Return the text of the refusal that `run` must raise."""
    message = str(raised(run, Exception))
    assert "ndif/" not in message, message
    return message


def refusal_of(run: Callable[[], Any]) -> str | None:
    """Return the text of the refusal of `run`; None if it succeeds."""
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
        message = error_of(context.trace)
        assert "This server does not know the API key" in message, message
        assert "Handshake" not in message, message
    context.of("free").trace()
    CONFIG.API.HOST = right


def scenario_requests_a_minute(context: Context) -> None:
    context.of("brisk")

    def run() -> None:
        for _ in range(4):
            context.trace()

    message = error_of(run)
    assert "3 requests a minute" in message, message
    context.of("free").trace()


def scenario_unfinished_jobs(context: Context) -> None:
    jobs = [context.of("small").send(seconds) for seconds in (LONG_S, 0)]
    try:
        message = error_of(context.trace)
        assert "may have 2 jobs that wait or run at once" in message, message
    finally:
        for job in jobs:
            answer = httpx.delete(
                f"{URL}/request/{job.job_id}", headers={"ndif-api-key": KEYS["small"]}
            )
            assert answer.status_code == 200, answer.text
    context.trace()


def scenario_the_queue_of_a_model(context: Context) -> None:
    job = context.of("free").send(LONG_S)
    try:
        message = error_of(context.of("last").trace)
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

    message = error_of(run)
    assert "your API key may send" in message, message


def scenario_the_size_of_a_result(context: Context) -> None:
    message = error_of(lambda: context.of("small").trace(numbers=100_000))
    assert "more than 200kB" in message, message
    context.trace(numbers=1000)


def scenario_the_size_of_stored_results(context: Context) -> None:
    jobs = [context.of("store").send(0, numbers=30_000) for _ in range(3)]
    message = error_of(lambda: [until(job) for job in jobs])
    assert "of at most 300kB, which is your limit" in message, message


def scenario_channels(context: Context) -> None:
    if context.is_older:  # an older client opens channels without its key
        return
    held = websocket.create_connection(
        f"ws{URL[4:]}/subscribe", header={"ndif-api-key": KEYS["channel"]}, timeout=PATIENCE_S
    )
    message = error_of(context.of("channel").trace)
    assert message.startswith("Failed to send request: Your API key may have one live ch"), message
    held.close()

    until(lambda: refusal_of(context.trace) is None)


def scenario_seconds_a_day(context: Context) -> None:
    """The block takes more than a second; the server reads the sum every ten seconds."""
    context.of("spent").trace(seconds=1.2)
    message = until(lambda: refusal_of(context.trace))
    assert "ndif/" not in message, message
    assert "and may run 1s a day" in message, message


def scenario_a_key_that_is_revoked_while_its_client_waits(context: Context) -> None:
    polled = context.of("revoked").send(LONG_S)
    soon = ["sh", "-c", f"sleep 1; {os.environ['TEST_REVOKE']}"]
    with subprocess.Popen(soon, stdout=subprocess.DEVNULL) as revoking:
        began = time.monotonic()
        message = error_of(context.trace)  # this job waits behind the other one
        assert time.monotonic() - began < LONG_S / 2
    assert revoking.returncode == 0
    assert "its API key was revoked" in message, message
    ended = until(
        lambda: [
            row
            for row in httpx.get(f"{URL}/requests", headers={"ndif-api-key": KEYS["heir"]}).json()[
                "requests"
            ]
            if row["id"] == polled.job_id and row["ended"]
        ]
    )
    assert ended[0]["status"] == "CANCELLED"
    assert "its API key was revoked" in ended[0]["reason"]

    until(lambda: "This API key was revoked" in (refusal_of(context.trace) or ""))
