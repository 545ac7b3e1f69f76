"""`ndif start --detach`: the run in a forked process that writes its output to the log."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time

from ndif.launch.run import ServiceRun
from ndif.launch.run_folder import RunRecord, failed_start, within
from ndif.net import StartError

_STOP_TIMEOUT_S = 60
_POLL_S = 0.1

_logger = logging.getLogger(__name__)


def run_detached(run: ServiceRun) -> RunRecord:
    """Run in a child process, and return its record once it answers; clean up after a failure."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The child inherits the lock and the port: nothing can take them between the checks and their use.
    child = os.fork()
    if child == 0:
        _run_in_child(run)
    run.close_inherited()
    try:
        return _wait_for(run, child)
    except BaseException:
        _stop(child)
        run.run_folder.discard()
        raise


def _run_in_child(run: ServiceRun) -> None:
    code = 1
    try:
        os.setsid()
        log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, standard)
        run.serve([], lambda _: None)
        code = 0
    except StartError as error:
        _logger.error("%s", error)  # noqa: TRY400 - a sentence for the operator
    except BaseException:
        _logger.exception("%s failed", run.subject)
    finally:
        if run.was_ready:  # otherwise the parent reads the log before it removes the run folder
            run.run_folder.end()
        logging.shutdown()
        # An ordinary exit would also run the parent's clean-up.
        os._exit(code)


def _wait_for(run: ServiceRun, child: int) -> RunRecord:
    deadline = time.monotonic() + run.start_timeout_s
    while time.monotonic() < deadline and not os.waitpid(child, os.WNOHANG)[0]:
        if run.answers() and (record := run.run_folder.record()) is not None:
            return record
        time.sleep(_POLL_S)
    raise StartError(failed_start(run.subject, run.log))


def _stop(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGTERM)
        if not within(_STOP_TIMEOUT_S, lambda: os.waitpid(child, os.WNOHANG)[0] != 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
