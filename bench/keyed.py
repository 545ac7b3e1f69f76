"""A client with an API key that sends series of jobs to several servers in alternating rounds.

Usage: keyed.py NAME KEY URL...; prints one JSON list: each address's jobs a second, the medians of the
rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

NAME, KEY, *ADDRESSES = sys.argv[1:]
os.environ["NDIF_API_KEY"] = KEY

from nnsight import TransformersModel  # noqa: E402 - nnsight reads the key at import
from nnsight.schema.config import CONFIG  # noqa: E402

PROMPT = "The Eiffel Tower is in the city of"
ROUNDS, JOBS = 8, 10

CONFIG.APP.REMOTE_LOGGING = False
model = TransformersModel(NAME, task="text-generation")


def rate(address: str) -> float:
    """Run a series of jobs against `address`; return the jobs a second."""
    CONFIG.API.HOST = address
    began = time.perf_counter()
    for _ in range(JOBS):
        with model.trace(PROMPT, remote=True):
            hidden = model.model.layers[5].output.save()
        assert hidden.shape[-1] == 576
    return JOBS / (time.perf_counter() - began)


def main() -> None:
    """Measure each address in alternating rounds, after one that does not count."""
    for address in ADDRESSES:
        rate(address)
    rounds = [[rate(address) for address in ADDRESSES] for _ in range(ROUNDS)]
    print(json.dumps([statistics.median(column) for column in zip(*rounds, strict=True)]))


main()
