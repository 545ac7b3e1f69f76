"""Attacks by hybrid jobs of nnsight 0.7, whose blocks exchange messages with the client.

The server: NDIF_MAX_STREAMED_BYTES=4000000, SOCKETIO_MAX_HTTP_BUFFER_SIZE=2000000 and
NDIF_EXECUTION_TIMEOUT_SECONDS=20.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
import time
from typing import Any

import httpx
import nnsight
import torch
import websocket
from comparing import PATIENCE_S, time_passes
from nnsight import CONFIG, LanguageModel
from nnsight.intervention.backends import remote as remote_backend
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.schema.response import ResponseModel
from scenarios_headers import error_of, fixed_local, polled

PROMPT = "The Eiffel Tower is in the city of"
MESSAGE = 1_000_000


class Context:
    """The model without weights, as a client has it."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        CONFIG.API.APIKEY = ""
        self.remote = LanguageModel(name)


class Wire:
    """A Socket.IO connection without a library: a test decides about each read and each message."""

    def __init__(self) -> None:
        address = os.environ["NDIF_HOST"].replace("http", "ws", 1)
        self._socket = websocket.create_connection(
            f"{address}/ws/socket.io/?EIO=4&transport=websocket", timeout=PATIENCE_S
        )
        self._socket.recv()
        self._socket.send("40")
        self.session = json.loads(self._socket.recv()[2:])["sid"]

    def upload(self, content: bytes, request_id: str) -> None:
        """Send a `stream_upload` of this content."""
        event = ["stream_upload", {"_placeholder": True, "num": 0}, request_id]
        self._socket.send(f"451-{json.dumps(event)}")
        self._socket.send_binary(content)

    def statuses(self) -> list[str]:
        """Read until the job or the connection ends; return the statuses and descriptions of the job."""
        statuses: list[str] = []
        while not statuses or not statuses[-1].startswith(("COMPLETED", "ERROR")):
            try:
                frame = self._socket.recv()
            except (websocket.WebSocketConnectionClosedException, ConnectionError):
                return [*statuses, "CLOSED"]
            if frame == "2":
                self._socket.send("3")
            elif isinstance(frame, bytes):
                with contextlib.suppress(OSError, websocket.WebSocketException):  # it may be closed
                    self._socket.send("431[]")  # the server waits for this acknowledgement
                response = ResponseModel.unpickle(frame)
                statuses.append(f"{response.status.name} {response.description}")
            elif not frame:
                return [*statuses, "CLOSED"]
        return statuses

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class ByHand(RemoteBackend):
    """Sends a request for a `Wire`, and does not wait for its result."""

    def __init__(self, context: Context, wire: Wire) -> None:
        super().__init__(context.remote.to_model_key())
        self._wire = wire

    def __call__(self, tracer: Any = None) -> None:
        data, headers = self.request(tracer)
        headers["ndif-session_id"] = self._wire.session
        self.submit_request(data, headers)


def asking_without_end(context: Context, wire: Wire) -> str:
    """Send a job that streams a megabyte at a time, and continues after each answer; return its id."""
    backend = ByHand(context, wire)
    with context.remote.session(backend=backend) as session:
        numbers = torch.zeros(250_000)
        while True:
            with session.local():
                answer = len(numbers)
                answer.remote()
    return str(backend.job_id)


def waiting(context: Context, wire: Wire) -> str:
    """Send a job that streams no function and sleeps; return its id."""
    backend = ByHand(context, wire)
    with context.remote.session(backend=backend):
        import time

        time.sleep(8)
        done = nnsight.save(1)
    return str(backend.job_id)


def answered(context: Context) -> None:
    """Run an ordinary job, which returns at once."""
    with context.remote.trace(PROMPT, remote=True):
        logits = context.remote.lm_head.output.save()
    assert logits.shape[0] == 1


@fixed_local()
def scenario_a_stream_without_end(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.session(remote=True) as session:
            numbers = torch.zeros(250_000)
            while True:
                with session.local():
                    answer = len(numbers)
                    answer.remote()
            numbers.save()

    message = error_of(run)
    assert "more than 4MB" in message, message
    assert "NDIF_MAX_STREAMED_BYTES" in message
    answered(context)


@fixed_local()
def scenario_a_client_that_polls(context: Context) -> None:
    """A client that polls cannot answer; the server does not wait for an answer."""
    answered(context)
    with context.remote.session(remote=True, blocking=False) as session:
        numbers = torch.arange(5)
        with session.local():
            answer = len(numbers)
            answer.remote()
        answer.save()
    message = error_of(lambda: polled(session.backend))
    assert "blocking=True" in message, message
    answered(context)


@fixed_local()
def scenario_a_stream_that_is_too_large_at_once(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.session(remote=True) as session:
            numbers = torch.zeros(1_100_000)
            with session.local():
                answer = len(numbers)
                answer.remote()
            answer.save()

    message = error_of(run)
    assert "NDIF_MAX_STREAMED_BYTES" in message, message
    answered(context)


def scenario_a_stream_that_nobody_reads(context: Context) -> None:
    """A client that answers every streamed function in advance, and reads none of them."""
    wire = Wire()
    job = asking_without_end(context, wire)
    answer = _dumped({"answer": 1})
    for _ in range(200):
        wire.upload(answer, job)
        time.sleep(0.02)
    answered(context)
    # The data that waits for the client does not exceed the limit of streamed bytes.
    statuses = wire.statuses()
    assert statuses[-1].startswith("ERROR"), statuses
    assert "NDIF_MAX_STREAMED_BYTES" in statuses[-1]
    wire.close()


def scenario_an_answer_that_is_too_large(context: Context) -> None:
    """The answer ends the connection and the job."""
    wire = Wire()
    job = asking_without_end(context, wire)
    with contextlib.suppress(OSError, websocket.WebSocketException):
        for _ in range(10):
            wire.upload(bytes(50 * MESSAGE), job)
    answered(context)
    assert wire.statuses()[-1] == "CLOSED"


def scenario_answers_that_nobody_asked_for(context: Context) -> None:
    """A job that streams no function, but gets 300 MB of answers."""
    wire = Wire()
    job = waiting(context, wire)
    for _ in range(300):
        wire.upload(bytes(MESSAGE), job)
    # The server reads this job after the answers, so the answers have arrived by then.
    answered(context)
    wire.close()


def scenario_answers_to_a_job_that_is_not_there(context: Context) -> None:
    wire = Wire()
    for number in range(300):
        wire.upload(bytes(MESSAGE), f"{number}")
    answered(context)
    wire.close()


@fixed_local()
def scenario_answers_for_anothers_job(context: Context) -> None:
    model = context.remote
    theirs = Wire()
    answers = RemoteBackend.stream_send
    sent: list[str] = []

    def late(self: Any, values: Any, channel: Any) -> None:
        sent.append(self.job_id)
        for _ in range(5):
            theirs.upload(_dumped({"answer": 666}), self.job_id)
        time_passes(0.5)  # so that the other client's answer comes first
        answers(self, values, channel)

    RemoteBackend.stream_send = late
    try:
        with model.session(remote=True) as session:
            numbers = torch.arange(5)
            with session.local():
                answer = len(numbers)
                answer.remote()
            number = int(answer).save()
    finally:
        RemoteBackend.stream_send = answers
        theirs.close()
    assert sent
    assert number == 5


class _Gadget:
    def __reduce__(self) -> Any:
        return eval, ("int(open('/etc/passwd').readline())",)


class _NoDict:
    def __reduce__(self) -> Any:
        return list, ()


def _dumped(value: Any) -> bytes:
    content: bytes = remote_backend.dumps(value)
    return content


def _answer_of(context: Context, content: bytes) -> str:
    """Return the error of a job whose client answers with this content."""
    answers = RemoteBackend.stream_send

    def crafted(self: Any, values: Any, channel: Any) -> None:
        channel.emit("stream_upload", data=(content, self.job_id))

    def run() -> None:
        with context.remote.session(remote=True) as session:
            numbers = torch.arange(5)
            with session.local():
                answer = len(numbers)
                answer.remote()
            answer.save()

    RemoteBackend.stream_send = crafted
    try:
        return error_of(run)
    finally:
        RemoteBackend.stream_send = answers


@fixed_local()
def scenario_an_answer_that_is_code(context: Context) -> None:
    """A client's answer is a pickle; the server reads it by the rules for requests."""
    message = _answer_of(context, pickle.dumps(_Gadget()))
    assert "builtins.eval cannot be sent to this server" in message, message
    assert "root" not in message
    answered(context)


@fixed_local()
def scenario_an_answer_that_is_nonsense(context: Context) -> None:
    for content in (b"", b"garbage", pickle.dumps(_NoDict()), pickle.dumps({1: 2})):
        message = _answer_of(context, content)
        assert message, content
        assert "site-packages" not in message, message
    answered(context)


def scenario_many_clients_that_do_not_read(context: Context) -> None:
    """Five clients reach their limits one after the other; other jobs do not wait long for them."""
    wires = [Wire() for _ in range(5)]
    jobs = [asking_without_end(context, wire) for wire in wires]
    answer = _dumped({"answer": 1})
    ended = threading.Event()

    def keep_answering() -> None:
        while not ended.is_set():
            for wire, job in zip(wires, jobs, strict=True):
                with contextlib.suppress(OSError, websocket.WebSocketException):
                    wire.upload(answer, job)
            time.sleep(0.05)

    answering = threading.Thread(target=keep_answering, daemon=True)
    answering.start()
    try:
        answered(context)
    finally:
        ended.set()
        answering.join()
    for wire in wires:
        wire.close()
    status = httpx.get(f"{os.environ['NDIF_HOST']}/ping")
    assert status.json() == "pong"
