"""Six models with memory for two: a job on a model that has to be loaded again, and on a HOT model.

One server declares two GPUs, each for one model: the other models wait in memory (WARM). Another server
declares CPU memory for two: the other models are only on the disk (COLD). No GPU is needed, since models on
declared GPUs run on the CPU. The client is light, and its key may deploy models.
"""

from __future__ import annotations

import base64
import itertools
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import truediv
from pathlib import Path

import httpx
import uvloop
from tests.tiny_models import make_gpt2

from bench.clients.user import User
from bench.figures import Figure
from bench.sampling import in_turn
from bench.scenario import Site
from bench.servers.machine import Machine, machine
from bench.servers.processes import client
from ndif.stores.accounts.port import tier_with

_MODELS, _ROUNDS = 6, 12
_ROOM = {
    "WARM": {"NDIF_NODE_GPUS": "2x1.5MB", "NDIF_GPU_CONTEXT_BYTES": "0"},
    "COLD": {"NDIF_NODE_CPU_MEMORY": "2.8MB"},
}
"""Memory for two of these models, each of 1.1 MB with its padding, by the level of the other models."""
_HOT = "HOT"


def measure(site: Site) -> Iterator[Figure]:
    """Measure both servers, one after the other."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [make_gpt2(Path(scratch, str(seed)), seed) for seed in range(_MODELS)]
        for level, room in _ROOM.items():
            environment = {
                **site.environment,
                **room,
                "NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS": "0",
            }
            users = {"user-0": tier_with(("hotswapping",), "swapping")}
            with machine({}, environment, users=users) as host:
                yield _brought_back(host, level, folders)


def _brought_back(host: Machine, level: str, folders: Sequence[Path]) -> Figure:
    names = [f"bench/tiny-{number}" for number in range(len(folders))]
    for name, folder in zip(names, folders, strict=True):
        host.deploy(name, folder)
    # The last model is HOT, so that a client can read its files; the block is the same for all models.
    request = json.loads(client("payload", "0.8", host.url, "tiny", runs=names[-1]).stdout)
    payload = base64.b64decode(request["payload"])
    users = [User(host.port, request["key"].replace(names[-1], name), host.key) for name in names]
    turns = itertools.cycle(users)
    last = users[-1]
    loop = uvloop.new_event_loop()

    def run(user: User) -> None:
        loop.run_until_complete(user.run(payload))

    def run_next() -> None:
        nonlocal last
        last = next(turns)
        run(last)

    for user in users:
        loop.run_until_complete(user.connect())
    samples = in_turn({level: run_next, _HOT: lambda: run(last)}, rounds=_ROUNDS, warm_up=_MODELS)
    for user in users:
        user.close()
    loop.close()
    models = [httpx.get(f"{host.url}/models/{name}").json() for name in names]
    levels = Counter(model["deployment_level"] for model in models)
    if levels != {_HOT: 2, level: len(names) - 2}:
        raise RuntimeError(f"Two models were to be HOT and the others {level}: {levels}.")
    loads = [model["load_s"]["0.8"] for model in models]
    how = (
        f"{samples.median(level) * 1e3:.0f} / {samples.median(_HOT) * 1e3:.0f} ms; "
        f"a load takes {statistics.median(loads) * 1e3:.0f} ms; {samples.summary}"
    )
    name = f"job on one of {len(names)} models where two fit, {level} / {_HOT}"
    return Figure.of(name, samples.per_round(truediv, level, _HOT), None, "x", how=how)
