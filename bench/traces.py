"""Traces of real clients in several ways, in turn."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.sampling import Samples
from bench.servers.processes import client, instant

HERE, INSTANT = "in process", "instant"


def sample(
    block: str,
    hub: str,
    ways: Mapping[str, Mapping[str, str]],
    *,
    generation: str = "0.8",
    with_instant: bool = False,
    compress: bool = True,
    **taken: Any,
) -> Samples:
    """Run a block of `bench.clients.traces` in each way, as a client that reads models from `hub`.

    The instant server answers with the answer of the first server in `ways`. `compress`: request
    compression, as nnsight does by default.
    """
    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(tempfile.TemporaryDirectory())
        specification = {
            "block": block,
            "ways": dict(ways),
            "taken": taken,
            "ready": ready,
            "compress": compress,
        }
        if with_instant:
            specification["ways"][INSTANT] = {"url": stack.enter_context(instant(Path(ready)))}
        out = client("traces", generation, hub, json.dumps(specification))
    return Samples.of_json(json.loads(out.stdout.splitlines()[-1]))
