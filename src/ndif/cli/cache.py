"""`ndif cache`: the models in this machine's Hub cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ndif.cli.output import console, elapsed, show_answer, show_json, table
from ndif.cli.server_client import (
    CommandError,
    NoServerHereError,
    NotFoundError,
    RefusedCommandError,
    connect,
    options,
    with_options_of,
)
from ndif.sizes import format_size

if TYPE_CHECKING:
    from ndif.runtime.weights.cache import CachedRepository, CacheState

Kept = Mapping[str, str]
"""The reason to keep each repository, by its name in lower case."""


@click.group("cache")
def command() -> None:
    """Show and delete models in this machine's Hub cache.

    HF_HOME or HF_HUB_CACHE sets the folder of the cache. The server of this machine, or of --url, names the
    models that are deployed or booked. On a worker of a cluster, give --url.
    """


def _kept_repositories(url: str | None, token: str | None) -> Kept:
    """Return the repositories that the server keeps; empty without a server."""
    try:
        answer = connect(url, token).get("/admin/cache")
    except NoServerHereError:
        return {}
    return {name.lower(): why for name, why in answer["kept"].items()}


with_kept = with_options_of(_kept_repositories)


def _scan(kept: Kept, limit: str) -> CacheState:
    from ndif.config.units import parse_limit
    from ndif.runtime.weights.cache import CacheRules, locked, scan

    with locked():
        return scan(CacheRules(parse_limit(limit), tuple(kept)))


def _state_of(repository: CachedRepository, kept: Kept) -> str | None:
    return kept.get(repository.name.lower()) or ("in use" if repository.in_use else None)


@command.command("list")
@with_kept
def list_cached(kept: Kept, as_json: bool) -> None:
    """Show the models in the cache, most recently used first, and the free space."""
    state = _scan(kept, options().cache_bytes)
    repositories = sorted(state.repositories, key=lambda repository: -repository.last_used)
    if as_json:
        rows = [
            {**asdict(repository), "state": _state_of(repository, kept)}
            for repository in repositories
        ]
        totals = {"folder": str(state.folder), "total_bytes": state.total_bytes}
        space = {"limit_bytes": state.limit_bytes, "free_bytes": state.free_bytes}
        show_json({"repositories": rows, **totals, **space})
        return
    limit = "no limit" if state.limit_bytes is None else f"limit {format_size(state.limit_bytes)}"
    title = (
        f"{state.folder}: {format_size(state.total_bytes)}, {limit}, "
        f"{format_size(state.free_bytes)} of its disk free"
    )
    cells = (
        (
            repository.name,
            ", ".join(commit[:8] for commit in repository.revisions),
            format_size(repository.size_bytes),
            elapsed(repository.last_used),
            _state_of(repository, kept),
        )
        for repository in repositories
    )
    headings = ("model", "revisions", "size", "not used for", "state")
    console().print(table(title, headings, cells))


@command.command("prune")
@click.option(
    "--to",
    metavar="SIZE",
    help="Target size, such as 500GB, or 80% of the disk.  [default: NDIF_CACHE_BYTES]",
)
@click.option("--dry-run", is_flag=True, help="List the models without deleting them.")
@with_kept
def prune(kept: Kept, as_json: bool, to: str | None, dry_run: bool) -> None:
    """Delete the least recently used models until the cache is no larger than SIZE.

    Models that are deployed, booked or in use are kept.
    """
    from ndif.runtime.weights.cache import delete_parts

    if not (limit := options().cache_bytes if to is None else to):
        raise click.UsageError("Give --to SIZE, or set NDIF_CACHE_BYTES.")
    try:
        state = _scan(kept, limit)
        if not dry_run:
            delete_parts()
            state = _scan(kept, limit)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--to") from error
    chosen = state.oldest(state.total_bytes - (state.limit_bytes or 0))
    _delete(state, chosen, as_json, dry_run=dry_run)


@command.command("rm")
@click.argument("name")
@with_kept
def remove(kept: Kept, as_json: bool, name: str) -> None:
    """Delete the model NAME from the cache."""
    state = _scan(kept, "")
    matches = [
        repository for repository in state.repositories if repository.name.lower() == name.lower()
    ]
    if not matches:
        raise NotFoundError(
            f"{name!r} is not in {state.folder}; `ndif cache list` lists the cached models."
        )
    for repository in matches:
        if (why := _state_of(repository, kept)) is not None:
            raise RefusedCommandError(f"{repository.name!r} stays in the cache: it is {why}.")
    _delete(state, matches, as_json)


def _delete(
    state: CacheState, chosen: list[CachedRepository], as_json: bool, *, dry_run: bool = False
) -> None:
    """Delete repositories and print the result; raise a CommandError if one could not be deleted."""
    from ndif.runtime.weights.cache import delete

    deleted = [repository for repository in chosen if dry_run or delete(repository.name)]
    remaining = state.total_bytes - sum(repository.size_bytes for repository in deleted)
    verb = "Would delete" if dry_run else "Deleted"
    lines = [
        f"{verb} {repository.name} ({format_size(repository.size_bytes)})."
        for repository in deleted
    ]
    lines.append(f"The cache {'would have' if dry_run else 'has'} {format_size(remaining)}.")
    if (
        state.limit_bytes is not None
        and remaining > state.limit_bytes
        and len(deleted) == len(chosen)
    ):
        lines.append("All remaining models are deployed, booked or in use.")
    answer = {
        "deleted": [repository.name for repository in deleted],
        "total_bytes": remaining,
        "dry_run": dry_run,
    }
    show_answer(answer, as_json, lines)
    if failed := [repository.name for repository in chosen if repository not in deleted]:
        raise CommandError(
            f"These models are in use, or this user may not delete them: {', '.join(failed)}."
        )
