"""Progress of replicas that are loading, and the outcome of a deployment."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from ndif.cli.output import show_answer, variant_name
from ndif.cli.server_client import CommandError, ServerClient

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_POLL_S = 0.5


def post_with_progress(
    server: ServerClient, path: str, body: Mapping[str, Any], *, quiet: bool
) -> Any:
    """POST `body`, show the replicas that are loading until the answer comes, and return the answer."""
    answer: Future[Any] = Future()

    def post() -> None:
        try:
            answer.set_result(server.post(path, body, None))
        except Exception as error:
            answer.set_exception(error)

    # A daemon thread: an interrupted command does not wait for the answer.
    threading.Thread(target=post, daemon=True).start()
    try:
        if not quiet:
            _show(server, answer)
        return answer.result()
    except KeyboardInterrupt as error:
        raise CommandError(
            "Interrupted; the server continues the operation. `ndif status` shows its progress."
        ) from error


def _show(server: ServerClient, answer: Future[Any]) -> None:
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
                _update(bars, shown, server.get("/admin/status"))
            except CommandError:
                return  # the answer to the POST says what is wrong


def _update(bars: Progress, shown: dict[str, TaskID], status: Any) -> None:
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
        done = replica["done"] or 0
        bars.update(shown[replica_id], completed=done, total=replica["total"])


def report(answer: Any, as_json: bool, *, state: str) -> None:
    """Print the outcome of a deployment, whose replicas are in `state`; raise the problems of models."""
    models = answer["models"]
    show_answer(answer, as_json, (line for model in models for line in _outcome(model, state)))
    failed = [f"{model['repo_id']}: {model['problem']}" for model in models if model["problem"]]
    if failed:
        raise CommandError("\n".join(failed))


def _outcome(model: Mapping[str, Any], state: str) -> Iterator[str]:
    for each in model["evicted"]:
        replica = f"replica {each['replica_id']}" if each["replica_id"] else "while it was set up"
        yield f"Evicted: {variant_name(each['model'])} ({replica})."
    count = len(model["replicas"])
    if count:
        yield f"{model['repo_id']} {state}: {count} {'replica' if count == 1 else 'replicas'}."
    elif not model["problem"]:
        yield f"{model['repo_id']} has no replicas left."
