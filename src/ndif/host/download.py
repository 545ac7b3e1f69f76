"""Download a model's files, in a process that ends before untrusted code runs."""

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
    """The files cannot be downloaded; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """Facts about a model that only a hub knows."""

    repo_id: str | None
    task: str | None


async def download(
    spec: ModelSpec, runtime: Runtime, progress: Callable[[int, int], None]
) -> Found:
    """Download the files of a repository to the cache.

    Raises:
        DownloadError: with the reason, in a sentence.
    """
    process = await asyncio.create_subprocess_exec(
        str(runtime.interpreter),
        "-m",
        "ndif.runtime.weights.fetch",
        json.dumps(spec.header()),
        env=environment(runtime),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    found: Found | None = None
    why = "the download ended without a reason"
    try:
        async for line in process.stdout:
            with contextlib.suppress(ValueError):  # a line that a library printed
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
