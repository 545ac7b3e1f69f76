"""A message that names the reason of a command's wait, once it takes longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_SILENCE_S = 2.0


@contextlib.contextmanager
def waiting_for(subject: str) -> Iterator[None]:
    """Print "Waiting for SUBJECT …" on standard error if the block takes more than two seconds.

    Print nothing if `subject` is empty, because such a caller shows its progress otherwise.
    """
    if not subject:
        yield
        return

    def announce() -> None:
        print(f"Waiting for {subject} …", file=sys.stderr, flush=True)

    timer = threading.Timer(_SILENCE_S, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
