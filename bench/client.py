"""A timed client of one generation: blocks in this process, on the server and on the instant server.

Usage: client.py NAME FOLDER SERVER INSTANT READY; prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nnsight
import torch

SMALL_ROUNDS = 50
LARGE_ROUNDS = 5
PROMPT = "The Eiffel Tower is in the city of"
MB = 1 << 20

NAME, FOLDER, SERVER, INSTANT, READY = sys.argv[1:]
OLDER = not version("nnsight").startswith("0.8")

if OLDER:
    from nnsight import CONFIG, LanguageModel
    from nnsight.intervention.backends.remote import RemoteBackend
    from nnsight.schema.response import ResponseModel

    remote_model = LanguageModel(NAME)
    local_model = LanguageModel(FOLDER, dispatch=True)
else:
    from nnsight import TransformersModel
    from nnsight.intervention.backends.remote import RemoteBackend
    from nnsight.schema.config import CONFIG

    remote_model = TransformersModel(NAME, task="text-generation")
    local_model = TransformersModel(FOLDER, task="text-generation", dispatch=True)

CONFIG.APP.REMOTE_LOGGING = False


def small(model: Any, remote: bool) -> None:
    """Read one layer and the last logits."""
    with model.trace(PROMPT, remote=remote):
        hidden = model.model.layers[5].output.save()
        logits = model.lm_head.output[:, -1].save()
    assert hidden.shape[-1] == 576
    assert logits.shape[-1] == 49152


def large(model: Any, remote: bool, size: int) -> None:
    """Return `size` bytes of bfloat16 that compress like a model's numbers."""
    count = size // 2
    with model.trace(PROMPT, remote=remote):
        weight = model.lm_head.weight.detach().flatten()
        values = torch.empty(count, dtype=weight.dtype).save()
        for start in range(0, count, weight.numel()):
            values[start : start + weight.numel()] = weight[: count - start]
    assert values.numel() == count
    assert values.dtype is torch.bfloat16


def timed(run: Callable[[], None]) -> float:
    """Return the seconds of one run."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def at(host: str, run: Callable[[], None]) -> float:
    """Return the seconds of one run against `host`."""
    CONFIG.API.HOST = host
    return timed(run)


def keep(name: str, run: Callable[[], None]) -> int:
    """Run once against the server, store the raw result for the instant server, and return its size."""
    kept: list[bytes] = []
    if OLDER:
        plain_unpickle, plain_load = ResponseModel.unpickle, RemoteBackend._decompress_and_load

        def unpickle(data: bytes) -> Any:
            response = plain_unpickle(data)
            if response.status.name == "COMPLETED" and isinstance(response.data, dict):
                kept.append(_embedded(data))
            return response

        def load(self: Any, result: Any) -> Any:
            kept.append(result.getvalue())
            return plain_load(self, result)

        ResponseModel.unpickle, RemoteBackend._decompress_and_load = unpickle, load
    else:
        plain = RemoteBackend.finalize

        def finalize(self: Any, content: bytes) -> Any:
            kept.append(content)
            return plain(self, content)

        RemoteBackend.finalize = finalize
    at(SERVER, run)
    if OLDER:
        ResponseModel.unpickle = plain_unpickle
        RemoteBackend._decompress_and_load = plain_load
    else:
        RemoteBackend.finalize = plain
    (content,) = kept
    Path(READY, name).write_bytes(content)
    urllib.request.urlopen(f"{INSTANT}/use/{name}").read()
    return len(content)


def _embedded(frame: bytes) -> bytes:
    """Return the result inside a frame: the bytes that its pickle passes to `_load_from_bytes`."""
    import pickletools

    start = 0
    for _ in range(3):
        end = next(p for op, _, p in pickletools.genops(frame[start:]) if op.name == "STOP")
        start += end + 1
    operations = pickletools.genops(frame[start:])
    return max((a for _, a, _ in operations if isinstance(a, bytes)), key=len)


def main() -> None:
    """Measure in alternating rounds, so that a slow minute of the machine affects all alike."""
    report: dict[str, Any] = {"nnsight": nnsight.__version__}
    keep("small", lambda: small(remote_model, True))
    times: dict[str, list[float]] = {"local": [], "server": [], "instant": []}
    for number in range(SMALL_ROUNDS + 5):
        row = {
            "local": timed(lambda: small(local_model, False)),
            "server": at(SERVER, lambda: small(remote_model, True)),
            "instant": at(INSTANT, lambda: small(remote_model, True)),
        }
        if number >= 5:
            for where, took in row.items():
                times[where].append(took)
    report["small"] = {where: statistics.median(took) for where, took in times.items()}
    # Differences of each round: a disturbance of a second slows all three.
    report["share"] = statistics.median(
        server - local - instant for local, server, instant in zip(*times.values(), strict=True)
    )
    for size in (64 * MB, 256 * MB):
        stored = keep(f"large-{size}", lambda size=size: large(remote_model, True, size))
        rows = [
            (
                at(SERVER, lambda size=size: large(remote_model, True, size)),
                at(INSTANT, lambda size=size: large(remote_model, True, size)),
            )
            for _ in range(LARGE_ROUNDS)
        ]
        report[f"large-{size // MB}"] = {
            "server": statistics.median(r[0] for r in rows),
            "instant": statistics.median(r[1] for r in rows),
            "stored": stored,
        }
    print(json.dumps(report))


main()
