"""`python -m ndif.runtime.fetch SPEC`: have a repository's files here, for a process without secrets.

What downloads a gated model holds a token, and what runs strangers' code must not: so another process
does it, which ends before the first of them comes. It prints JSON lines: how far it is, and last what only
a hub knows of the model: its name there, and its task.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from typing import Any

from ndif.runtime import progress, space
from ndif.runtime.generations import adapter
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import sentence
from ndif.runtime.zygote import canonical_name


def main(spec: ModelSpec) -> None:
    """Load the model without memory for its weights, which takes all of its files."""
    progress.report(lambda done, total: tell(done=done, total=total))
    generation = adapter(spec.generation)
    try:
        space.check(spec)
        generation.load(replace(spec, device="meta"))
    except Exception as error:
        traceback.print_exc()
        tell(failed=sentence(error))
        raise SystemExit(1) from error
    task = getattr(generation.model, "task", spec.task)
    tell(repo_id=canonical_name(generation.model, spec), task=task)


def tell(**said: Any) -> None:
    """One line to the host."""
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(ModelSpec.of(json.loads(sys.argv[1])))
