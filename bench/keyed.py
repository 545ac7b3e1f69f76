"""A client with API keys that sends series of jobs to several servers in alternating rounds.

Usage: keyed.py NAME KEY,...@URL...; each job of a series has the next key. Prints one JSON list: the jobs a
second of each argument, the medians of the rounds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time

from nnsight import TransformersModel
from nnsight.schema.config import CONFIG

NAME, *SERIES = sys.argv[1:]
PROMPT = "The Eiffel Tower is in the city of"
ROUNDS, JOBS = 8, 16

CONFIG.APP.REMOTE_LOGGING = False
model = TransformersModel(NAME, task="text-generation")


def rate(series: str) -> float:
    """Run a series of jobs with keys at an address; return the jobs a second."""
    keys, _, CONFIG.API.HOST = series.partition("@")
    began = time.perf_counter()
    for key in itertools.islice(itertools.cycle(keys.split(",")), JOBS):
        CONFIG.API.APIKEY = key
        with model.trace(PROMPT, remote=True):
            hidden = model.model.layers[5].output.save()
        assert hidden.shape[-1] == 576
    return JOBS / (time.perf_counter() - began)


def main() -> None:
    """Measure each series in alternating rounds, after one that does not count."""
    for series in SERIES:
        rate(series)
    rounds = [[rate(series) for series in SERIES] for _ in range(ROUNDS)]
    print(json.dumps([statistics.median(column) for column in zip(*rounds, strict=True)]))


main()
