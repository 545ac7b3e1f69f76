"""The threads that blocks of nnsight 0.6 and 0.7 run in, one a mediator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from nnsight.intervention import interleaver as interleaving

_END_TIMEOUT_S = 1.0

_started: list[tuple[Any, threading.Thread]] = []


def end_workers() -> None:
    """Let no thread of a block outlive it: after an error one may wait at a barrier for ever."""
    for mediator, _ in _started:
        # "release unlocked lock": it was told before.
        with contextlib.suppress(RuntimeError):
            mediator.response_queue.put(interleaving.Cancelation())
    for _, thread in _started:
        thread.join(_END_TIMEOUT_S)
    _started.clear()


_mediators: list[Any] = []
_start = interleaving.Mediator.start


def _start_known(mediator: Any, interleaver: Any) -> None:
    """`Mediator.start`, which calls `_thread` for this mediator."""
    _mediators.append(mediator)
    try:
        _start(mediator, interleaver)
    finally:
        _mediators.pop()


def _thread(
    *, target: Callable[..., None], args: tuple[Any, ...] = (), **others: Any
) -> threading.Thread:
    """A thread that is heard when it ends by `sys.exit`; the model would wait for it for ever."""
    mediator = _mediators[-1]

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:
            mediator.exception(error)

    thread = threading.Thread(target=run, **others)
    _started.append((mediator, thread))
    return thread


interleaving.Mediator.start = _start_known
interleaving.Thread = _thread
