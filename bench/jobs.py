"""A client that sends several jobs at once and waits for all of them.

Usage: jobs.py NAME URL...; prints one JSON list: each address's seconds until the last job ended, the
medians of alternating rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from nnsight import TransformersModel
from nnsight.schema.config import CONFIG

NAME, *ADDRESSES = sys.argv[1:]
PROMPT = "The Eiffel Tower is in the city of"
JOBS, TOKENS, ROUNDS = 6, 48, 3
_PAUSE_S = 0.3

CONFIG.APP.REMOTE_LOGGING = False
model = TransformersModel(NAME, task="text-generation")


def seconds(address: str) -> float:
    """Return the seconds until all jobs have ended."""
    CONFIG.API.HOST = address
    began = time.perf_counter()
    jobs = []
    for _ in range(JOBS):
        with model.generate(PROMPT, max_new_tokens=TOKENS, remote=True, blocking=False) as tracer:
            tracer.result.save()
        jobs.append(tracer.backend)
    # One job at a time, with pauses: a client makes a TLS context for each poll, 25 ms of a core.
    for job in jobs:
        while job() is None:
            time.sleep(_PAUSE_S)
    return time.perf_counter() - began


def main() -> None:
    """Measure each address in alternating rounds, after one that does not count."""
    for address in ADDRESSES:
        seconds(address)
    rounds = [[seconds(address) for address in ADDRESSES] for _ in range(ROUNDS)]
    print(json.dumps([statistics.median(column) for column in zip(*rounds, strict=True)]))


main()
