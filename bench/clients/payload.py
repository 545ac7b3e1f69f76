"""A client that sends nothing: it prints JSON with the model key, the payload of a block, and its nnsight.

Usage: payload.py NAME [BLOCK]; BLOCK is one of `bench.clients.blocks`, by default a short generation.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import nnsight
from nnsight.schema.request import RequestModel

from bench.clients.blocks import BLOCKS, OLDER, PROMPT, load

if OLDER:
    from nnsight.intervention.backends.base import Backend
else:
    from nnsight.tracing.backend import Backend

model = load(sys.argv[1])


class Printed(Backend):
    """Prints the request instead of sending it, and ends the program."""

    def __call__(self, tracer: Any) -> None:
        if OLDER:
            block = super().__call__(tracer)
            payload = RequestModel(interventions=block, tracer=tracer).serialize(False)
        else:
            payload = RequestModel.serialize(tracer, compress=False)
        request = {
            "key": model.to_model_key(),
            "payload": base64.b64encode(payload).decode(),
            "nnsight": nnsight.__version__,
        }
        print(json.dumps(request))
        raise SystemExit


if len(sys.argv) > 2:
    BLOCKS[sys.argv[2]](model, backend=Printed())
with model.generate(PROMPT, max_new_tokens=4, backend=Printed()) as tracer:
    tracer.result.save()
