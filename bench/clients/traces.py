"""A client of one generation that runs a block in several ways, in turn and after equal pauses.

Usage: traces.py NAME SPECIFICATION. The specification is JSON with these fields:

- `block`: a name in `bench.clients.blocks`;
- `ways`: by name, the `folder` of a model in this process, or the `url` and `key` of a server;
- `ready`: the folder of the instant server, if it is one of the ways;
- `compress`: true to compress requests and results;
- `taken`: further arguments of `bench.sampling.in_turn`.

The program prints the samples as one JSON object, with the bytes of the result in `more`.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nnsight.intervention.backends.remote import RemoteBackend

from bench.clients.blocks import BLOCKS, CONFIG, OLDER, Block, load
from bench.sampling import in_turn

NAME, SPECIFICATION = sys.argv[1], json.loads(sys.argv[2])
INSTANT = "instant"

if OLDER:
    from nnsight.schema.response import ResponseModel


def ran_here(block: Block, folder: str) -> Callable[[], None]:
    """Return a function that runs the block on a model in this process."""
    return partial(block, load(folder, dispatch=True))


def ran_there(block: Block, model: Any, url: str, key: str = "") -> Callable[[], None]:
    """Return a function that runs the block on a server."""

    def run() -> None:
        CONFIG.API.HOST, CONFIG.API.APIKEY = url, key
        block(model, remote=True)

    return run


def kept(run: Callable[[], None]) -> bytes:
    """Run a block on a server; return the bytes of its result."""
    contents: list[bytes] = []
    if OLDER:
        plain_unpickle, plain_load = ResponseModel.unpickle, RemoteBackend._decompress_and_load

        def unpickle(data: bytes) -> Any:
            response = plain_unpickle(data)
            if response.status.name == "COMPLETED" and isinstance(response.data, dict):
                contents.append(_embedded(data))
            return response

        def load(self: Any, result: Any) -> Any:
            contents.append(result.getvalue())
            return plain_load(self, result)

        ResponseModel.unpickle, RemoteBackend._decompress_and_load = unpickle, load
    else:
        plain = RemoteBackend.finalize

        def finalize(self: Any, content: bytes) -> Any:
            contents.append(content)
            return plain(self, content)

        RemoteBackend.finalize = finalize
    run()
    if OLDER:
        ResponseModel.unpickle = plain_unpickle
        RemoteBackend._decompress_and_load = plain_load
    else:
        RemoteBackend.finalize = plain
    return contents[-1]


def _embedded(frame: bytes) -> bytes:
    """Return the result in a frame: the bytes that its pickle passes to `_load_from_bytes`."""
    import pickletools

    start = 0
    for _ in range(3):
        end = next(p for op, _, p in pickletools.genops(frame[start:]) if op.name == "STOP")
        start += end + 1
    operations = pickletools.genops(frame[start:])
    return max((a for _, a, _ in operations if isinstance(a, bytes)), key=len)


def main() -> None:
    """Sample the ways of the specification."""
    CONFIG.API.COMPRESS = SPECIFICATION["compress"]
    name = SPECIFICATION["block"]
    block = BLOCKS[name]
    model = load(NAME)
    ways = {
        way: ran_here(block, **at) if "folder" in at else ran_there(block, model, **at)
        for way, at in SPECIFICATION["ways"].items()
    }
    size = None
    if INSTANT in ways:
        content = kept(
            next(run for way, run in ways.items() if "folder" not in SPECIFICATION["ways"][way])
        )
        Path(SPECIFICATION["ready"], name).write_bytes(content)
        urllib.request.urlopen(f"{SPECIFICATION['ways'][INSTANT]['url']}/use/{name}").read()
        size = len(content)
    samples = in_turn(ways, **SPECIFICATION["taken"])
    samples.more["result_bytes"] = size
    print(json.dumps(samples.to_json()))


if __name__ == "__main__":
    main()
