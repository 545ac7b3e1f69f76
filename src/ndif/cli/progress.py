"""Progress of replicas that are loading, and the outcome of a deployment."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.server_client import CommandError, ServerClient

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_POLL_S = 0.5


class _PendingPost(threading.Thread):
    """A POST in the background, whose answer comes when the operation is done."""

    def __init__(self, server: ServerClient, path: str, body: Mapping[str, Any]) -> None:
        # A daemon thread: an interrupted command does not wait for the answer.
        super().__init__(daemon=True)
        self._server, self._path, self._body = server, path, body
        self._answer: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            self._answer = self._server.post(self._path, self._body, None)
        except Exception as error:  # raised by `answer`
            self._error = error

    def answer(self) -> Any:
        """Return the answer, or raise the error that came instead."""
        if self._error is not None:
            raise self._error
        return self._answer


def post_with_progress(
    server: ServerClient, path: str, body: Mapping[str, Any], *, quiet: bool
) -> Any:
    """POST `body`, show the replicas that are loading until the answer comes, and return the answer.

    Raises:
        CommandError: If the server refuses, with its message.
    """
    post = _PendingPost(server, path, body)
    post.start()
    try:
        if not quiet:
            _show(server, post)
        post.join()
    except KeyboardInterrupt as error:
        raise CommandError(
            "Interrupted; the server continues the operation. `ndif status` shows its progress."
        ) from error
    return post.answer()


def _show(server: ServerClient, post: _PendingPost) -> None:
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
        while post.is_alive():
            post.join(_POLL_S)
            try:
                _update(bars, shown, server.get("/admin/status"))
            except CommandError:
                return  # the answer to the POST says what is wrong


def _update(bars: Progress, shown: dict[str, TaskID], status: Any) -> None:
    loading = dict(_loading(status))
    for replica_id in [known for known in shown if known not in loading]:
        bars.remove_task(shown.pop(replica_id))
    for replica_id, (name, done, total) in loading.items():
        if replica_id not in shown:
            shown[replica_id] = bars.add_task(f"Loading {name}", total=None)
        bars.update(shown[replica_id], completed=done or 0, total=total)


def _loading(status: Any) -> Iterator[tuple[str, tuple[str, int | None, int | None]]]:
    for model in status["models"]:
        for replica in model["replicas"]:
            if replica["state"] == "DEPLOYING":
                yield (
                    replica["replica_id"],
                    (model["repo_id"], replica["done"], replica["total"]),
                )


def report(answer: Any, as_json: bool, *, state: str) -> None:
    """Print the outcome of a deployment; `state` describes the replicas that were deployed.

    Raises:
        CommandError: If a model could not be deployed.
    """
    from ndif.cli.output import show_json

    models = answer["models"]
    failed = [model for model in models if model["problem"]]
    if as_json:
        show_json(answer)
    else:
        for model in models:
            _report_model(model, state)
    if failed:
        raise CommandError("\n".join(f"{model['repo_id']}: {model['problem']}" for model in failed))


def _report_model(model: Mapping[str, Any], state: str) -> None:
    from ndif.cli.output import variant_name

    for each in model["evicted"]:
        replica = f"replica {each['replica_id']}" if each["replica_id"] else "while it was set up"
        click.echo(f"Evicted: {variant_name(each['model'])} ({replica}).")
    count = len(model["replicas"])
    if count:
        click.echo(f"{model['repo_id']} {state}: {_replicas(count)}.")
    elif not model["problem"]:
        click.echo(f"{model['repo_id']} has no replicas left.")


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
