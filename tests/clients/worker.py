"""A real client in its own process: runs the scenarios that its standard input names.

Usage: worker.py SCENARIOS NAME FOLDER. Each input line is a scenario's name; each output line is a JSON
object. NDIF_HOST and HF_ENDPOINT in the environment point at the server. FOLDER holds the weights, with
which the same blocks run in this process.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback

from tests.http import prepare_http


def main() -> None:
    """Import the client, report that it is ready, and run scenarios."""
    scenarios, name, folder = sys.argv[1:]
    prepare_http()
    # nnsight prints; the real standard output is reserved for the protocol.
    out, sys.stdout = sys.stdout, sys.stderr
    module = importlib.import_module(scenarios)
    context = module.Context(name, folder)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        try:
            getattr(module, line.strip())(context)
            answer = {"failed": None}
        except BaseException:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
