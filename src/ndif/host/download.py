"""A model's files, fetched by a process that ends before strangers' code can be near it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from ndif.host.environment import environment
from ndif.host.runtimes import Runtime
from ndif.runtime.spec import ModelSpec


class DownloadError(Exception):
    """The files are not to be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """What only a hub knows of a model."""

    repo_id: str | None
    task: str | None


async def download(
    spec: ModelSpec, runtime: Runtime, progress: Callable[[int, int], None]
) -> Found:
    """Have the files of a repository in the cache.

    Raises:
        DownloadError: with the reason, in a sentence.
    """
    process = await asyncio.create_subprocess_exec(
        str(runtime.interpreter),
        "-m",
        "ndif.runtime.fetch",
        json.dumps(spec.header()),
        env=environment(runtime),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    found: Found | None = None
    why = "its download ended"
    try:
        async for line in process.stdout:
            with contextlib.suppress(ValueError):  # what a library prints is not for us
                match json.loads(line):
                    case {"done": int(done), "total": int(total)}:
                        progress(done, total)
                    case {"failed": str(why)}:
                        pass
                    case {"repo_id": str() | None as repo_id, "task": str() | None as task}:
                        found = Found(repo_id, task)
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if found is None:
        raise DownloadError(why)
    return found
