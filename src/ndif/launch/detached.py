"""`ndif start --detach`: the same server in a process of its own, whose output is its log."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time

from ndif.gateway.serving import StartError
from ndif.launch.run import Run
from ndif.session.record import Record

_ENDS_WITHIN_S = 60
_POLL_S = 0.1
_LAST_LINES = 15

_log = logging.getLogger(__name__)


def detach(run: Run) -> Record:
    """Start it, and wait until it answers.

    Raises:
        StartError: if it does not, with the end of its log. Nothing is left of it then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # The lock and the port go with it: nobody can come between the checks and their use.
    child = os.fork()
    if child == 0:
        _be_it(run)
    run.release()
    try:
        return _record(run, child)
    except BaseException:
        _end(child)
        run.session.discard()
        raise


def _be_it(run: Run) -> None:
    code = 1
    try:
        os.setsid()
        log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, place)
        run.serve([], lambda _: None)
        code = 0
    except StartError as error:
        _log.error("%s", error)
    except BaseException:
        _log.exception("The server ended.")
    finally:
        if run.is_up:  # else who started it wants to read the log
            run.session.end()
        logging.shutdown()
        # Nothing of the command that it was forked from is its own to finish.
        os._exit(code)


def _record(run: Run, child: int) -> Record:
    is_up = _answers(run, child)
    record = run.session.record()
    if is_up and record is not None:
        return record
    said = _last_lines(run)
    if said:
        raise StartError(f"The server did not come up. The end of its log:\n{said}")
    raise StartError("The server did not come up, and logged nothing.")


def _answers(run: Run, child: int) -> bool:
    deadline = time.monotonic() + run.comes_up_within_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        if run.answers():
            return True
        time.sleep(_POLL_S)
    return False


def _last_lines(run: Run) -> str:
    try:
        lines = run.log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_LAST_LINES:])


def _end(child: int) -> None:
    deadline = time.monotonic() + _ENDS_WITHIN_S
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGTERM)
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(_POLL_S)
