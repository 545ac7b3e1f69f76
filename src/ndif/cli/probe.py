"""`ndif probe`: a trace to each model, sent by the nnsight client of each generation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from ndif.cli.durations import DurationParam
from ndif.cli.jobs import as_user
from ndif.cli.output import console, show_json, table
from ndif.cli.server_client import CommandError, NotFoundError, ServerClient, options, read
from ndif.launch.waiting import waiting_for

if TYPE_CHECKING:
    from ndif.host.runtimes import Runtime
    from ndif.probe.outcome import ProbeOutcome, Value
    from ndif.probe.probe import Target
    from ndif.schema.answer import JsonObject
    from ndif.schema.client_status import ModelStatus

_MS = 1000.0
_FAILED_EXIT = 1


@click.command("probe")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--generation",
    "generations",
    multiple=True,
    metavar="GENERATION",
    help="Probe only with this nnsight generation, such as 0.8; repeatable. Default: the installed "
    "generations for which the model is deployed.",
)
@click.option(
    "--timeout",
    type=DurationParam(0, is_open=True),
    default="2m",
    metavar="DURATION",
    help="Maximum time of one probe, including the start of its client.",
)
@as_user
def command(
    server: ServerClient,
    as_json: bool,
    models: tuple[str, ...],
    generations: tuple[str, ...],
    timeout: float,
) -> None:
    """Send a small trace to each deployed model, as a client does, and check the returned value.

    MODEL is a repository, optionally followed by @ and a revision. By default, the command probes dedicated
    models, and models that an operator deployed and that serve now. Probes run one after the other. The
    exit code is 1 if a probe fails. Without an API key, the operator's token is used.
    """
    from ndif.host.runtimes import Runtimes, how_to_add
    from ndif.schema.client_status import ServerStatus

    runtimes = Runtimes(options().runtimes).installed()
    if missing := [generation for generation in generations if generation not in runtimes]:
        raise CommandError(
            f"nnsight {missing[0]} is not installed here; {', '.join(runtimes) or 'none'} is. "
            f"{how_to_add(missing[0])}"
        )
    deployments = read(ServerStatus, server.get("/status")).deployments
    # A model of several replicas has several entries.
    unique = {model.model_key: model for model in deployments.values()}
    chosen = list(_chosen(unique, models))
    results: list[tuple[Target, ProbeOutcome]] = []
    first: dict[str, Value] = {}
    with TemporaryDirectory(prefix="ndif-probe-", ignore_cleanup_errors=True) as cache:
        for model in chosen:
            for generation in generations or _generations_of(model, runtimes):
                result = _probe(
                    server, model, runtimes[generation], Path(cache), first, timeout_s=timeout
                )
                results.append(result)
    if as_json:
        show_json({"probes": [_described(*result) for result in results]})
    elif results:
        console().print(
            table(
                "Probes", ("model", "nnsight", "outcome", "took", ""), [_row(*r) for r in results]
            )
        )
    else:
        click.echo("No deployed model can be probed.")
    if any(outcome.failed for _, outcome in results):
        sys.exit(_FAILED_EXIT)


def _chosen(
    deployments: Mapping[str, ModelStatus], names: tuple[str, ...]
) -> Iterator[ModelStatus]:
    """Yield the models with these names; without names, the models that are probed by default."""
    if not names:
        yield from (model for model in deployments.values() if _is_deployed(model))
        return
    for name in names:
        repo_id, _, revision = name.partition("@")
        matches = [
            model
            for model in deployments.values()
            if model.repo_id.lower() == repo_id.lower()
            and (not revision or model.revision == revision)
        ]
        if not matches:
            raise NotFoundError(f"The server has no model {name!r} deployed.")
        yield from matches


def _is_deployed(model: ModelStatus) -> bool:
    if model.dedicated:
        return True
    return any(model.replicas.values()) and not model.on_demand


def _generations_of(model: ModelStatus, runtimes: Mapping[str, Runtime]) -> Iterator[str]:
    deployed = [generation for generation in runtimes if generation in model.runtimes]
    yield from deployed or [*runtimes][:1]


def _probe(
    server: ServerClient,
    model: ModelStatus,
    runtime: Runtime,
    cache: Path,
    first: dict[str, Value],
    *,
    timeout_s: float,
) -> tuple[Target, ProbeOutcome]:
    """Probe a model; `first` collects the first value of each model, from any generation."""
    from ndif.probe.outcome import ProbeOutcome
    from ndif.probe.probe import Target, probe
    from ndif.schema.states import ProbeKind, ReplicaState

    generation = runtime.generation
    target = Target(model.repo_id, model.revision, model.task, generation)
    if model.trust_remote_code:
        return target, ProbeOutcome(
            ProbeKind.UNSUPPORTED, "The probe's client would run the repository's own code."
        )
    if model.runtimes.get(generation, model.state) is ReplicaState.DEPLOYING:
        return target, ProbeOutcome(ProbeKind.LOADING, "The model is being loaded.")
    with waiting_for(f"a trace of {target.label} by nnsight {generation}"):
        outcome = asyncio.run(
            probe(target, runtime, server.url, server.job_key, cache, timeout_s)
        ).against(first.get(target.label))
    if outcome.kind is ProbeKind.OK and outcome.value is not None:
        first.setdefault(target.label, outcome.value)
    return target, outcome


def _described(target: Target, outcome: ProbeOutcome) -> JsonObject:
    return {
        "model": target.label,
        "generation": target.generation,
        "failed": outcome.failed,
        "outcome": outcome.kind.value,
        "reason": outcome.reason,
        "seconds": outcome.seconds,
        "value": None if outcome.value is None else asdict(outcome.value),
    }


def _row(target: Target, outcome: ProbeOutcome) -> tuple[object, ...]:
    took = None if outcome.seconds is None else f"{outcome.seconds * _MS:,.0f} ms"
    return target.label, target.generation, outcome.kind.value, took, outcome.reason
