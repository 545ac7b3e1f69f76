"""A client of nnsight 0.8 that runs small traces on a server; prints the median of their seconds.

Usage: honest.py NAME.
"""

from __future__ import annotations

import statistics
import sys
import time

from nnsight import TransformersModel
from nnsight.schema.config import CONFIG

ROUNDS = 20

CONFIG.APP.REMOTE_LOGGING = False


def main() -> None:
    """Run them."""
    model = TransformersModel(sys.argv[1], task="text-generation")
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with model.trace("The Eiffel Tower is in the city of", remote=True):
            logits = model.lm_head.output[:, -1].save()
        assert logits.shape[0] == 1
        took.append(time.perf_counter() - began)
    print(statistics.median(took))


main()
