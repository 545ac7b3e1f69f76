"""Messages of a server with low limits to a real client, and payloads that tests replay.

The server: NDIF_MAX_REQUEST_BYTES=1000000, NDIF_MAX_RESULT_BYTES=2000000 and
NDIF_MAX_INLINE_RESULT_BYTES=100000.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from nnsight import TransformersModel
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.schema.config import CONFIG
from nnsight.schema.request import RequestModel
from nnsight.schema.response import ResponseModel, Status
from scenarios_08 import PROMPT, error_of


class Context:
    """The model without weights, as a client has it."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        self.remote = TransformersModel(name, task="text-generation")


class Recorder(RemoteBackend):
    """Writes the payload to a file instead of sending it."""

    def __init__(self, key: str, file: Path) -> None:
        super().__init__(key, blocking=False)
        self.file = file

    def _post(self, request: RequestModel, blob: bytes) -> ResponseModel:
        self.file.write_bytes(blob)
        return ResponseModel(id="recorded", status=Status.RECEIVED)


def scenario_a_result_over_the_limit(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            model.transformer.h[0].output.save()
            large = torch.zeros(1_000_000).save()

    message = error_of(run)
    assert "more than 2MB" in message, message
    assert "NDIF_MAX_RESULT_BYTES" in message
    assert "Save fewer values" in message
    assert "Traceback" not in message
    # The message suggests bfloat16, which is within the limit.
    with model.trace(PROMPT, remote=True):
        model.transformer.h[0].output.save()
        small = torch.zeros(900_000, dtype=torch.bfloat16).save()
    assert small.shape == (900_000,)


def scenario_a_result_over_the_limit_that_compresses_well(context: Context) -> None:
    """The limit counts bytes in the client's memory, not compressed bytes."""
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            model.transformer.h[0].output.save()
            much = ("0" * 10_000_000).save()

    assert "more than 2MB" in error_of(run)


def scenario_a_result_over_the_inline_limit_is_fetched(context: Context) -> None:
    torch.manual_seed(0)
    sent = torch.randn(200_000)
    fetched: list[Any] = []
    backend = RemoteBackend(context.remote.to_model_key())
    download = backend.download_result
    backend.download_result = lambda data: fetched.append(data) or download(data)
    with context.remote.trace(PROMPT, backend=backend):
        received = (sent * 2).save()
    assert torch.equal(received, sent * 2)
    assert fetched[0].startswith(os.environ["NDIF_HOST"] + "/results/"), fetched


def scenario_a_request_over_the_limit(context: Context) -> None:
    torch.manual_seed(0)
    dataset = torch.randn(1_000_000)

    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            total = (context.remote.transformer.h[0].output.sum() + dataset.sum()).save()

    message = error_of(run)
    assert "larger than 1MB" in message, message
    assert "NDIF_MAX_REQUEST_BYTES" in message
    assert "Refer only to the parts that it needs" in message


def scenario_a_request_that_unpacks_to_more_than_the_limit(context: Context) -> None:
    dataset = torch.zeros(10_000_000)

    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            total = (context.remote.transformer.h[0].output.sum() + dataset.sum()).save()

    message = error_of(run)
    assert "when decompressed; this server takes at most 1MB" in message, message


def scenario_payloads_are_recorded(context: Context) -> None:
    """Write two payloads to the folder RECORDED: a block that ends, and a block that does not end."""
    model, folder = context.remote, Path(os.environ["RECORDED"])
    with model.trace(PROMPT, backend=Recorder(model.to_model_key(), folder / "ends")):
        hidden = model.transformer.h[0].output.save()
        large = torch.arange(100_000.0).save()
    with model.trace(PROMPT, backend=Recorder(model.to_model_key(), folder / "never ends")):
        import time

        model.transformer.h[0].output.save()
        print("begun")
        while True:
            time.sleep(0.01)
    assert sorted(file.name for file in folder.iterdir()) == ["ends", "never ends"]
