"""A message that names the reason of a command's wait, once it takes longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_SILENCE_S = 2.0


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Print "Waiting for WHAT …" on standard error if the block takes more than two seconds.

    Print nothing for an empty text, of a caller that shows progress otherwise.
    """
    if not what:
        yield
        return

    def say() -> None:
        print(f"Waiting for {what} …", file=sys.stderr, flush=True)

    timer = threading.Timer(_SILENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
