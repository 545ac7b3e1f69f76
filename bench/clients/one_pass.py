"""A program that runs eight small traces in its own process: one by one, and as invokes of one trace.

Usage: one_pass.py FOLDER ROUNDS; prints one JSON object with the seconds of both in each round.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from nnsight import TransformersModel

_TRACES = 8
_PROMPT = "The Eiffel Tower is in"


def one_by_one(model: Any) -> None:
    """Run each trace separately."""
    for _ in range(_TRACES):
        with model.trace(_PROMPT):
            hidden = model.model.layers[5].output.save()  # noqa: F841
            token = model.lm_head.output[:, -1].argmax(-1).save()  # noqa: F841


def together(model: Any) -> None:
    """Run all traces in one forward pass."""
    with model.trace() as tracer:
        found = [].save()  # type: ignore[attr-defined]
        for _ in range(_TRACES):
            with tracer.invoke(_PROMPT):
                found.append(model.model.layers[5].output)
                found.append(model.lm_head.output[:, -1].argmax(-1))


def _seconds(run: Callable[[Any], None], model: Any) -> float:
    began = time.perf_counter()
    run(model)
    return time.perf_counter() - began


def main() -> None:
    """Measure rounds of both, after a warm-up round."""
    folder, rounds = sys.argv[1], int(sys.argv[2])
    model = TransformersModel(folder, task="text-generation", dispatch=True)
    ways = (one_by_one, together)
    took: dict[str, list[float]] = {run.__name__: [] for run in ways}
    for number in range(rounds + 1):
        for run in ways:
            seconds = _seconds(run, model)
            if number:
                took[run.__name__].append(seconds)
    print(json.dumps(took))


if __name__ == "__main__":
    main()
