"""A client that sends nothing: prints, as JSON, the model key and the payload of a block.

Usage: payload.py NAME [BLOCK], one of `bench.clients.blocks`; a short generation if it is not given.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend

from bench.clients.blocks import BLOCKS, PROMPT, load

model = load(sys.argv[1])


class Printed(Backend):
    """Prints what a client would send, and ends the program."""

    def __call__(self, tracer: Any) -> None:
        payload = RequestModel.serialize(tracer, compress=False)
        print(
            json.dumps({"key": model.to_model_key(), "payload": base64.b64encode(payload).decode()})
        )
        raise SystemExit


if len(sys.argv) > 2:
    BLOCKS[sys.argv[2]](model, backend=Printed())
with model.generate(PROMPT, max_new_tokens=4, backend=Printed()) as tracer:
    tracer.result.save()
