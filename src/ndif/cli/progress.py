"""What an operator sees while replicas are brought up, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.admin import CommandError, Server

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_POLL_S = 0.5


class _Asking(threading.Thread):
    """A POST that is answered when all is done; meanwhile there is something to look at."""

    def __init__(self, server: Server, path: str, body: Mapping[str, Any]) -> None:
        # A daemon: who interrupts the command does not wait for the answer.
        super().__init__(daemon=True)
        self._server, self._path, self._body = server, path, body
        self._answer: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            self._answer = self._server.post(self._path, self._body, None)
        except Exception as error:  # it is raised where it is asked for
            self._error = error

    def answer(self) -> Any:
        """What came of it."""
        if self._error is not None:
            raise self._error
        return self._answer


def watched(server: Server, path: str, body: Mapping[str, Any], *, quiet: bool) -> Any:
    """What a route answers to `body`; until then the replicas that are loading are shown.

    Raises:
        CommandError: with what the server says, if it refuses.
    """
    asking = _Asking(server, path, body)
    asking.start()
    try:
        if not quiet:
            _show(server, asking)
        asking.join()
    except KeyboardInterrupt as error:
        raise CommandError(
            "No longer watched; the server goes on with it. `ndif status` shows how far it is."
        ) from error
    return asking.answer()


def _show(server: Server, asking: _Asking) -> None:
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
        while asking.is_alive():
            asking.join(_POLL_S)
            try:
                _update(bars, shown, server.get("/admin/status"))
            except CommandError:
                return  # the answer itself says what is wrong


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
    """Say what came of a deployment; `state` is what its replicas are in, if they are.

    Raises:
        CommandError: if a model could not be deployed.
    """
    from ndif.cli.output import show_json

    models = answer["models"]
    failed = [model for model in models if model["problem"]]
    if as_json:
        show_json(answer)
    else:
        for model in models:
            _say(model, state)
    if failed:
        raise CommandError("\n".join(f"{model['repo_id']}: {model['problem']}" for model in failed))


def _say(model: Mapping[str, Any], state: str) -> None:
    from ndif.cli.output import called

    for each in model["evicted"]:
        what = f"replica {each['replica_id']}" if each["replica_id"] else "it was being set up"
        click.echo(f"Evicted for it: {called(each['model'])} ({what}).")
    count = len(model["replicas"])
    if count:
        click.echo(f"{model['repo_id']} {state}: {_replicas(count)}.")
    elif not model["problem"]:
        click.echo(f"{model['repo_id']} has no replicas any more.")


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
