"""`ndif deploy`: load models before their first request."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ndif.cli.output import show_answer, variant_name
from ndif.cli.revisions import RevisionParam
from ndif.cli.server_client import CommandError, ServerClient, read, with_server
from ndif.config.units import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ndif.control.answers import DeployedModel, Outcomes

_POLL_S = 0.5


Command = TypeVar("Command", bound=Callable[..., Any])

SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--dedicated/--no-dedicated",
        {"help": "Never evict these models for other models, or allow eviction again."},
    ),
    (
        "--replicas",
        {
            "type": click.IntRange(1),
            "help": "Number of replicas of each model.",
        },
    ),
    ("--max-replicas", {"type": int, "help": "Maximum number of replicas while requests wait."}),
    ("--revision", {"type": RevisionParam(), "help": "Branch, tag or commit of the repository."}),
    ("--task", {"help": "The transformers task, such as fill-mask."}),
    ("--dtype", {"help": "Data type of the weights, such as bfloat16; auto: the checkpoint's."}),
    ("--device", {"help": "Device: auto, cpu, cuda, or one GPU, such as cuda:0."}),
    (
        "--attn-implementation",
        {
            "help": "Attention implementation of requests that name none, such as eager, which "
            "allows reading attention weights."
        },
    ),
    ("--threads", {"type": int, "help": "CPU threads of the model; 0: one per core."}),
    (
        "--execution-timeout-seconds",
        {"metavar": "DURATION", "help": 'Maximum run time of a request, such as "15m".'},
    ),
    (
        "--size-bytes",
        {
            "metavar": "SIZE",
            "help": 'Memory of the weights, instead of the measured size, such as "140GB".',
        },
    ),
    (
        "--padding-factor",
        {
            "type": float,
            "help": "Memory reserved in addition to the weights, as a fraction of their size.",
        },
    ),
    (
        "--padding-bytes",
        {
            "metavar": "SIZE",
            "help": 'Memory reserved in addition to --padding-factor, such as "12GiB".',
        },
    ),
    (
        "--trust-remote-code/--no-trust-remote-code",
        {"help": "Run, or never run, the Python code in the checkpoint's repository."},
    ),
)
"""Options for the settings of a deployment file, under the same names."""


def with_settings(function: Command) -> Command:
    """Add an option for each setting of a deployment."""
    for name, arguments in reversed(SETTINGS):
        function = click.option(name, default=None, **arguments)(function)
    return function


@click.command("deploy")
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]...")
@click.option(
    "--deployment-config",
    "-f",
    "deployment_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML or JSON file of models and their settings.",
)
@click.option(
    "--sync",
    is_flag=True,
    help="Also evict every other deployed model, and reset settings that are not given to their defaults.",
)
@with_settings
@click.option("--pinned", is_flag=True, hidden=True, help="Name of --dedicated in NDIF 0.1.")
@click.option(
    "--generation",
    metavar="0.8",
    help="Deploy for clients of this nnsight generation; default: the newest.",
)
@click.option(
    "--no-wait", is_flag=True, help="Return at once instead of when the models are ready."
)
@with_server
def command(
    server: ServerClient,
    as_json: bool,
    /,
    checkpoints: tuple[str, ...],
    deployment_file: Path | None,
    sync: bool,
    pinned: bool,
    generation: str | None,
    no_wait: bool,
    **settings: Any,
) -> None:
    """Deploy each CHECKPOINT: a Hugging Face repo id, a model key, or ORG/NAME=FOLDER.

    FOLDER is on the server's machine. A deployed model keeps the settings that are not given. The exit code
    is 1 if a model could not be deployed.
    """
    entries = _entries(server, checkpoints, deployment_file)
    given = {name: value for name, value in settings.items() if value is not None}
    if pinned:
        given["pinned"] = True
    for entry in entries:
        entry.update(given)
    wait = not no_wait
    body = {"deployments": entries, "generation": generation, "wait": wait, "sync": sync}
    names = ", ".join(entry["repo_id"] for entry in entries)
    awaited = (
        f"{names} to be placed" if no_wait else f"{names} to load; `ndif status` shows how far"
    )
    quiet = as_json or no_wait
    answer = post_with_progress(server, "/admin/deploy", body, quiet=quiet, awaited=awaited)
    report(answer, as_json, state="is loading" if no_wait else "is ready")


def _entries(
    server: ServerClient, checkpoints: tuple[str, ...], file: Path | None
) -> list[dict[str, Any]]:
    if bool(checkpoints) == (file is not None):
        raise click.UsageError("Give either CHECKPOINTs or a file with --deployment-config.")

    from ndif.schema.deployment_file import read_changes, to_entry
    from ndif.schema.deployment_settings import parse_checkpoint

    if file is None:
        return [
            to_entry(parse_checkpoint(checkpoint, is_local=server.is_local))
            for checkpoint in checkpoints
        ]
    changes = read_changes(file)
    if not changes:
        raise CommandError(f"{file} names no model.")
    return [to_entry(change.config, change.given) for change in changes]


def post_with_progress(
    server: ServerClient, path: str, body: Mapping[str, Any], *, quiet: bool, awaited: str
) -> Outcomes:
    """POST `body`, show progress bars of loading replicas until the answer comes, and return the answer.

    With `quiet` or without a terminal, print that the command waits for `awaited` instead.
    """
    from ndif.control.answers import Outcomes

    answer: Future[Outcomes] = Future()

    if not quiet and sys.stderr.isatty():
        awaited = ""  # the progress bars show the progress

    def post() -> None:
        try:
            answer.set_result(read(Outcomes, server.post(path, body, None, awaited)))
        except Exception as error:
            answer.set_exception(error)

    # A daemon thread: an interrupted command does not wait for the answer.
    threading.Thread(target=post, daemon=True).start()
    try:
        if not quiet:
            _show_progress(server, answer)
        return answer.result()
    except KeyboardInterrupt as error:
        raise CommandError(
            "Interrupted; the server continues the operation. `ndif status` shows its progress."
        ) from error


def _show_progress(server: ServerClient, answer: Future[Outcomes]) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        shown: dict[str, TaskID] = {}
        while not wait([answer], _POLL_S).done:
            try:
                _update_bars(bars, shown, server.get("/admin/status"))
            except CommandError:
                return  # the answer to the POST reports the error


def _update_bars(bars: Progress, shown: dict[str, TaskID], status: Any) -> None:
    loading = {
        replica["replica_id"]: (model["repo_id"], replica)
        for model in status["models"]
        for replica in model["replicas"]
        if replica["state"] == "DEPLOYING"
    }
    for replica_id in shown.keys() - loading.keys():
        bars.remove_task(shown.pop(replica_id))
    for replica_id, (name, replica) in loading.items():
        if replica_id not in shown:
            shown[replica_id] = bars.add_task(f"Loading {name}", total=None)
        loaded = replica["done"] or 0
        bars.update(shown[replica_id], completed=loaded, total=replica["total"])


def report(answer: Outcomes, as_json: bool, *, state: str) -> None:
    """Print the outcome of a deployment; raise a CommandError with the models' problems, if any.

    `state` is the predicate of a sentence about a model, such as "is ready".
    """
    lines = dict.fromkeys(line for model in answer.models for line in _outcome_lines(model, state))
    show_answer(answer, as_json, iter(lines))
    failed = [f"{model.repo_id}: {model.problem}" for model in answer.models if model.problem]
    if failed:
        raise CommandError("\n".join(failed))


def _outcome_lines(model: DeployedModel, state: str) -> Iterator[str]:
    name = model.repo_id
    if model.changes:
        yield f"{name}: {', '.join(map(str, model.changes))}."
    for eviction in model.evicted:
        replica = f"replica {eviction.replica_id}" if eviction.replica_id else "while it was set up"
        yield f"Evicted: {variant_name(eviction.model)} ({replica})."
    if model.is_down:
        is_over = state == "is ready"
        lasts = "" if model.down_s is None else f" ({format_duration(model.down_s)})"
        yield (
            f"There {'was' if is_over else 'is'} no memory for old and new replicas of {name} at once: the "
            f"model {'was unavailable while it loaded' if is_over else 'is unavailable while it loads'}"
            f"{lasts}."
        )
    count = len(model.replicas)
    if count:
        yield f"{name} {state}: {count} {'replica' if count == 1 else 'replicas'}."
    elif not model.problem:
        yield f"{name} has no replicas left."
