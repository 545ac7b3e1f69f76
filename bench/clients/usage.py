"""A client of one generation that sends jobs of several kinds for a while, and adds up their usage.

Usage: usage.py NAMES KEY SECONDS SEED; prints one JSON object.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import time
from importlib.metadata import version
from typing import Any

import httpx
import nnsight
import torch
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend

NAMES, KEY, SECONDS, SEED = sys.argv[1:]
PROMPT = "The Eiffel Tower is in the city of"
OLDER = not version("nnsight").startswith("0.8")
URL = os.environ["NDIF_HOST"]

CONFIG.APP.REMOTE_LOGGING = False
CONFIG.API.APIKEY = KEY
if OLDER:
    models = [nnsight.LanguageModel(name) for name in NAMES.split(",")]
else:
    models = [nnsight.TransformersModel(name, task="text-generation") for name in NAMES.split(",")]
counts: collections.Counter[str] = collections.Counter()
seconds = 0.0


class Backend(RemoteBackend):  # type: ignore[misc] # one of the generations has no types
    """Adds up the bytes of results, with nnsight 0.8 only."""

    def finalize(self, content: bytes) -> Any:
        """Count a result's bytes."""
        counts["result_bytes"] += len(content)
        return super().finalize(content)


def sent(*, blocking: bool, runs_s: float = 0.0, fails: bool = False, numbers: int = 0) -> Backend:
    """Send a job; wait for its end if `blocking`."""
    model = random.choice(models)
    backend = Backend(model.to_model_key(), blocking=blocking)
    counts["sent"] += 1
    try:
        with model.trace(PROMPT, backend=backend):
            hidden = model.model.layers[5].output.save()  # noqa: F841 - saving needs a variable
            noise = torch.rand(numbers).save()  # noqa: F841
            time.sleep(runs_s)
            if fails:
                [][1]
    except Exception as error:
        if not (fails and "list index out of range" in str(error)):
            raise
        ended(backend, "ERROR")
    else:
        if blocking:
            ended(backend, "COMPLETED")
    return backend


def ended(backend: Backend, status: str) -> None:
    """Count the end of a job, and its execution time."""
    global seconds
    counts[status] += 1
    if (meta := getattr(backend, "meta", None)) is not None:
        seconds += meta["execution_time"]


def polled(backend: Backend) -> None:
    """Poll for a job until it has ended."""
    try:
        while backend() is None:
            time.sleep(0.05)
    except Exception as error:
        # The server counts no error for a job that its user has ended.
        ended(backend, "CANCELLED" if "You have ended this job" in str(error) else "ERROR")
    else:
        ended(backend, "COMPLETED")


def send_one() -> None:
    """Send one job of a random kind."""
    kind = random.choices(
        ("live", "polled", "error", "cancelled", "several", "large"), (50, 15, 10, 5, 10, 10)
    )[0]
    match kind:
        case "live":
            sent(blocking=True, runs_s=random.choice((0.0, 0.0, 0.1)))
        case "polled":
            polled(sent(blocking=False))
        case "error":
            sent(blocking=True, fails=True)
        case "cancelled":
            backend = sent(blocking=False, runs_s=20)
            time.sleep(random.uniform(0, 1))
            httpx.delete(
                f"{URL}/request/{backend.job_id}", headers={"ndif-api-key": KEY}, timeout=60
            )
            polled(backend)
        case "several":
            for backend in [sent(blocking=False) for _ in range(3)]:
                polled(backend)
        case "large":
            sent(blocking=True, numbers=2_000_000)


random.seed(int(SEED))
deadline = time.monotonic() + float(SECONDS)
while time.monotonic() < deadline:
    send_one()
    time.sleep(random.uniform(0, 0.6))
print(json.dumps({**counts, "execution_s": seconds}))
