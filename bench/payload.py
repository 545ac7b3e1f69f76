"""A client that sends nothing: prints, as JSON, the model key and the payload of a short generation.

Usage: payload.py NAME
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from nnsight import TransformersModel
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend

model = TransformersModel(sys.argv[1], task="text-generation")


class Printed(Backend):
    """Prints what a client would send."""

    def __call__(self, tracer: Any) -> None:
        payload = RequestModel.serialize(tracer, compress=False)
        print(
            json.dumps({"key": model.to_model_key(), "payload": base64.b64encode(payload).decode()})
        )


with model.generate("The Eiffel Tower is in", max_new_tokens=4, backend=Printed()) as tracer:
    tracer.result.save()
