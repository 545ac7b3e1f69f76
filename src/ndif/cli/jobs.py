"""`ndif jobs`: the jobs of a user, or, with the operator's token, of all users."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import click

from ndif.cli.output import duration, elapsed, show, show_answer, table
from ndif.cli.server_client import (
    CommandError,
    NoServerError,
    NotFoundError,
    RefusedCommandError,
    ServerClient,
    options,
    read,
    with_server,
)
from ndif.config.short_ids import matching_ids, unique_length
from ndif.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ndif.schema.job_state import OwnJob

_CHUNK = 1 << 12
"""Bytes that are decompressed at a time: few, because zstd can expand its input 30,000-fold."""

P = ParamSpec("P")
T = TypeVar("T")


_key_option = click.option(
    "--key",
    metavar="KEY",
    help="Your API key; default: NDIF_API_KEY. Without a key, the operator's token is used.",
)


def as_user(function: Callable[Concatenate[ServerClient, bool, P], T]) -> Callable[..., T]:
    """Add the options of `with_server` and --key; with a key, the command acts as its user."""

    @functools.wraps(function)
    def command(server: ServerClient, as_json: bool, *args: Any, **kwargs: Any) -> T:
        key = kwargs.pop("key") or options().api_key.get_secret_value()
        return function(server.as_user(key) if key else server, as_json, *args, **kwargs)

    return with_server(_key_option(command))


@click.group("jobs")
def command() -> None:
    """List, cancel and download your jobs, with your API key."""


@command.command("list")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, help="Maximum number of ended jobs."
)
@as_user
def list_(server: ServerClient, as_json: bool, limit: int) -> None:
    """List waiting, running and recently ended jobs; with the operator's token, jobs of all users."""
    has_users = not server.is_user
    show({"jobs": _jobs(server, limit)}, as_json, partial(_rendered, has_users=has_users))


@command.command()
@click.argument("job_id")
@as_user
def cancel(server: ServerClient, as_json: bool, job_id: str) -> None:
    """End a waiting or running job. JOB_ID may be a unique prefix."""
    if server.is_user:
        full_id = whole_id(server, job_id)
        answer = server.delete(f"/request/{full_id}")
    else:
        answer = server.post("/admin/kill", {"request_id": job_id})
        full_id = answer["request_id"]
    show_answer(answer, as_json, [f"Job {full_id} is ended."])


@command.command()
@click.argument("job_id")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File to write.",
)
@as_user
def result(server: ServerClient, as_json: bool, job_id: str, output: Path) -> None:
    """Download the result of a job that was sent with blocking=False. JOB_ID may be a unique prefix.

    The file is written decompressed; `torch.load(FILE, weights_only=False)` reads it.
    """
    full_id = whole_id(server, job_id)
    try:
        response = server.get(f"/response/{full_id}")
    except RefusedCommandError as error:
        if server.is_user:
            raise
        raise RefusedCommandError(
            f"Only its user can download the result of job {full_id}: give the API key that sent the job, "
            "with --key or in NDIF_API_KEY."
        ) from error
    if response["status"] != "COMPLETED":
        raise CommandError(
            f"Job {full_id} has no result: its status is {response['status']}. {response['description']}"
        )
    data = response["data"]
    size = _download(data if isinstance(data, str) else data[0], output)
    answer = {"id": full_id, "file": str(output), "bytes": size}
    show_answer(
        answer, as_json, [f"The result of job {full_id} is in {output} ({format_size(size)})."]
    )


def _jobs(server: ServerClient, limit: int) -> list[dict[str, Any]]:
    if server.is_user:
        jobs: list[dict[str, Any]] = server.get(f"/requests?limit={limit}")["requests"]
    else:
        jobs = server.post("/admin/jobs", {"limit": limit})["jobs"]
    return jobs


def whole_id(server: ServerClient, job_id: str) -> str:
    """Return the id with the prefix `job_id`, or `job_id` if there is none; raise if there are several."""
    matches = matching_ids(job_id, (job["id"] for job in _jobs(server, 1000)))
    if len(matches) > 1:
        raise NotFoundError(
            f"{job_id!r} is the prefix of {len(matches)} ids: give more characters of the id."
        )
    return matches[0] if matches else job_id


def _download(url: str, output: Path) -> int:
    """Download and decompress a result; return its size. No partial file is left if an error occurs."""
    import httpx
    import zstandard

    part = output.with_name(f"{output.name}.part")
    try:
        with httpx.stream("GET", url, timeout=60) as answer, part.open("wb") as file:
            if answer.is_error:
                raise CommandError(f"The result cannot be fetched (HTTP {answer.status_code}).")
            chunks = answer.iter_raw(_CHUNK)
            first = next(chunks, b"")
            chunks = itertools.chain((first,), chunks)
            # Clients may ask for uncompressed results. A partial zstd header is a truncated result.
            is_compressed = zstandard.FRAME_HEADER.startswith(first[: len(zstandard.FRAME_HEADER)])
            for content in _decompressed(chunks) if is_compressed else chunks:
                file.write(content)
        size = part.stat().st_size
        part.replace(output)
    except httpx.HTTPError as error:
        raise NoServerError(f"The result cannot be fetched from {url}: {error}.") from error
    except zstandard.ZstdError as error:
        raise CommandError(
            f"The result is damaged: it cannot be decompressed ({error}). No file was written. Send the "
            "job again."
        ) from error
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
    return size


def _decompressed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of consecutive zstd frames; raise a `CommandError` if one is truncated."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    for chunk in chunks:
        left = chunk
        while left:
            if frame.eof:
                frame = decompressor.decompressobj()
            yield frame.decompress(left)
            left = frame.unused_data
    # zstd raises no error for a truncated frame, because more input could follow.
    if not frame.eof:
        raise CommandError(
            "The result is truncated: its compressed data end too early. No file was written. Download it "
            "again, or send the job again."
        )


def _rendered(answer: Mapping[str, Any], *, has_users: bool) -> RenderableType:
    from rich.text import Text

    from ndif.schema.job_state import JobState, OwnJob

    kind: type[OwnJob] = JobState if has_users else OwnJob
    jobs = [read(kind, job) for job in answer["jobs"]]
    if not jobs:
        return Text("There are no jobs.")
    length = unique_length(job.id for job in jobs)
    rows = [
        (
            job.id[:length],
            *([job.user] if isinstance(job, JobState) else []),
            job.model,
            _state(job),
            f"{elapsed(job.received)} ago",
            duration(job.execution_s) if job.ended else "",
            format_size(job.result_bytes) if job.ended else "",
            job.reason or "",
        )
        for job in jobs
    ]
    headings = (
        "job",
        *(["user"] if has_users else []),
        "model",
        "state",
        "received",
        "ran",
        "result",
        "",
    )
    return table("Jobs", headings, rows)


def _state(job: OwnJob) -> str:
    status = str(getattr(job.status, "value", job.status))
    return status if job.ended or job.position is None else f"{status}, number {job.position}"
