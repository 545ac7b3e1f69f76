"""`ndif local start`: one model, one user, one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ndif.cli.durations import DurationParam
from ndif.cli.output import warn_of_unread_variables
from ndif.cli.revisions import RevisionParam


@click.group("local")
def command() -> None:
    """Serve one model to yourself. The server trusts the code of its user, and of who has its token."""


@command.command("start")
@click.argument("checkpoint")
@click.option(
    "--name",
    metavar="ORG/NAME",
    help="Name by which clients ask for the model, if CHECKPOINT is a folder.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port; default: the first free one from 8289."
)
@click.option(
    "--dtype",
    default="auto",
    help="Data type of the weights, e.g. bfloat16; auto: the checkpoint's.",
)
@click.option(
    "--device",
    help="Device, e.g. cuda:0 or cpu; auto: spread over all GPUs; default: the fewest GPUs that hold the "
    "model.",
)
@click.option("--revision", type=RevisionParam(), help="Branch, tag or commit of the repository.")
@click.option("--task", help="transformers task; default: the task of the model's architecture.")
@click.option(
    "--attn-implementation",
    metavar="NAME",
    help="Attention of requests that name none, as those of nnsight 0.7: eager, to read attention weights; "
    "default: transformers' choice.",
)
@click.option(
    "--threads", type=click.IntRange(1), help="CPU threads of the model; default: one per core."
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    help="Replicas of the model that serve in parallel; on CPUs they share its weights.",
)
@click.option(
    "--results-dir",
    "results",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of polled jobs, and of results until they are fetched; default: one for the port in "
    "NDIF_SESSION_ROOT.",
)
@click.option("--share-weights", is_flag=True, help="Let clients download the weights as well.")
@click.option(
    "--sandbox",
    is_flag=True,
    help="Trust nobody: run every request in a confined process of its own.",
)
@click.option(
    "--no-token",
    is_flag=True,
    help="Ask nobody for the token: every user of this machine, and whoever reaches the address, runs code "
    "here as you (with --sandbox: confined).",
)
@click.option(
    "--execution-timeout",
    "execution_timeout_s",
    type=DurationParam(is_open=True),
    metavar="DURATION",
    help="Maximum run time of a request, such as 15m; default: NDIF_EXECUTION_TIMEOUT_SECONDS.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Show the log of the server and the model process."
)
def start(threads: int | None, **options: Any) -> None:
    """Serve CHECKPOINT, a Hugging Face repo id or a folder, to nnsight's remote=True."""
    from ndif.server.local import Local

    warn_of_unread_variables()
    Local(threads=threads or 0, **options).run()
