"""A client that sends a small trace each second, so that the server's state changes constantly.

Usage: dashboard.py NAME SECONDS.
"""

from __future__ import annotations

import sys
import time

from nnsight import TransformersModel
from nnsight.schema.config import CONFIG

NAME, SECONDS = sys.argv[1], float(sys.argv[2])
_INTERVAL_S = 1.0

CONFIG.APP.REMOTE_LOGGING = False
model = TransformersModel(NAME, task="text-generation")
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    began = time.monotonic()
    with model.trace("The Eiffel Tower is in the city of", remote=True):
        hidden = model.model.layers[5].output.save()
    time.sleep(max(0.0, _INTERVAL_S - (time.monotonic() - began)))
