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
    """Serve one model to yourself. The server trusts your code, and the code of clients with its token."""


@command.command("start")
@click.argument("checkpoint")
@click.option(
    "--name",
    metavar="ORG/NAME",
    help="Name of the model for clients, if CHECKPOINT is a folder.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port; default: the first free port from 8289."
)
@click.option(
    "--dtype",
    default="auto",
    help="Data type of the weights, such as bfloat16; auto: the checkpoint's.",
)
@click.option(
    "--device",
    help="Device, such as cuda:0 or cpu; auto: spread over all GPUs; default: the fewest GPUs that hold "
    "the model.",
)
@click.option("--revision", type=RevisionParam(), help="Branch, tag or commit of the repository.")
@click.option("--task", help="transformers task; default: the task of the model's architecture.")
@click.option(
    "--attn-implementation",
    metavar="NAME",
    help="Attention implementation of requests that name none, such as requests of nnsight 0.7. eager "
    "allows reading attention weights. Default: transformers' choice.",
)
@click.option(
    "--threads", type=click.IntRange(1), help="CPU threads of the model; default: one per core."
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    help="Number of replicas of the model. They serve in parallel, and share the weights on CPUs.",
)
@click.option(
    "--results-dir",
    "results",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of polled jobs, and of results until clients download them; default: one per port in "
    "NDIF_SESSION_ROOT.",
)
@click.option("--share-weights", is_flag=True, help="Also let clients download the weights.")
@click.option(
    "--sandbox",
    is_flag=True,
    help="Confine user code: run each request in a new confined process, which ends after the request.",
)
@click.option(
    "--no-token",
    is_flag=True,
    help="Require no token: all users of this machine, and everyone who can reach the address, run code "
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
