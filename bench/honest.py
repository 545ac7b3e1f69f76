"""A client of nnsight 0.8 that runs small traces on a server; prints the median of their seconds.

Usage: honest.py NAME [FILE]; with FILE it writes the payload of a trace of 7 MB, and runs nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from nnsight import TransformersModel
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.schema.config import CONFIG
from nnsight.schema.request import RequestModel
from nnsight.schema.response import ResponseModel, Status

ROUNDS = 10
PROMPT = "The Eiffel Tower is in the city of"

CONFIG.APP.REMOTE_LOGGING = False


class Recorder(RemoteBackend):
    """Writes what would be sent to a file."""

    def __init__(self, key: str, file: Path) -> None:
        super().__init__(key, blocking=False)
        self.file = file

    def _post(self, request: RequestModel, blob: bytes) -> ResponseModel:
        self.file.write_bytes(blob)
        return ResponseModel(id="recorded", status=Status.RECEIVED)


def trace_s(model: TransformersModel) -> float:
    """Return the seconds of one trace."""
    began = time.perf_counter()
    with model.trace(PROMPT, remote=True):
        logits = model.lm_head.output[:, -1].save()
    assert logits.shape[0] == 1
    return time.perf_counter() - began


def main() -> None:
    """Run the traces, or record one."""
    model = TransformersModel(sys.argv[1], task="text-generation")
    if len(sys.argv) > 2:
        with model.trace(PROMPT, backend=Recorder(model.to_model_key(), Path(sys.argv[2]))):
            values = torch.randn(1_750_000).save()  # noqa: F841 - a variable is what is saved
            model.lm_head.output.save()
        return
    print(statistics.median(trace_s(model) for _ in range(ROUNDS)))


main()
