"""A client of nnsight 0.8 that runs small traces on a server and prints their median seconds.

Usage: honest.py NAME [FILE]; with FILE it only writes the payload of a trace of 7 MB.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from nnsight import TransformersModel
from nnsight.schema.config import CONFIG
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend

ROUNDS = 10
PROMPT = "The Eiffel Tower is in the city of"

CONFIG.APP.REMOTE_LOGGING = False


class Recorder(Backend):
    """Writes the payload to a file instead of sending it."""

    def __call__(self, tracer: Any) -> None:
        Path(sys.argv[2]).write_bytes(RequestModel.serialize(tracer, compress=False))


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
        with model.trace(PROMPT, backend=Recorder()):
            values = torch.randn(1_750_000).save()  # noqa: F841 - saving needs a variable
            model.lm_head.output.save()
        return
    print(statistics.median(trace_s(model) for _ in range(ROUNDS)))


main()
