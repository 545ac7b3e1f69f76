"""`ndif logs`: the log of this machine's server or of a service."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import click

from ndif.cli.server_client import CommandError, run_folders
from ndif.launch.log_rotation import earlier_part
from ndif.launch.run_folder import LOG_NAMES
from ndif.launch.services import STANDALONE

_POLL_S = 0.3
_DISPATCHER = "dispatcher"


@click.command("logs")
@click.argument("service", default=LOG_NAMES[0], type=click.Choice(LOG_NAMES))
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Follow the log until the server ends or you press Ctrl-C.",
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=100,
    help="Number of lines to show from the end of the log.",
)
@click.option("--json", "--json-output", "as_json", is_flag=True, help="Print each line as JSON.")
def command(service: str, follow: bool, lines: int, as_json: bool) -> None:
    """Show the log of this machine's server, running or last started, or of one of its services."""
    run_folder = run_folders().latest()
    alone = run_folders().of_service(service).latest()
    if alone is not None and (run_folder is None or not run_folder.log(service).exists()):
        run_folder = alone
    if run_folder is None:
        raise CommandError(
            f"There is no log: no server has run with the session root {run_folders().root}."
        )
    log = run_folder.log(service)
    if service in STANDALONE and not log.exists():
        raise CommandError(
            f"{run_folder.id} started no {service}. Its log is on the machine where it runs."
        )
    if service == _DISPATCHER and not log.exists():
        # A server without a broker is one process.
        log = run_folder.log()
    try:
        with log.open(errors="replace") as file:
            last = deque(_earlier_lines(log), maxlen=lines)
            last.extend(_whole_lines(file))
            for line in last:
                _show(line, as_json)
            while follow and (record := run_folder.record()) is not None:
                # Read before the log, so that the last lines of a server that ends are shown.
                alive = record.is_alive
                # The low bits of a text position are a byte offset; the others are the decoder's state.
                if os.fstat(file.fileno()).st_size < file.tell() % (1 << 64):
                    file.seek(0)  # the log was rotated
                for line in _whole_lines(file):
                    _show(line, as_json)
                if not alive:
                    return
                time.sleep(_POLL_S)
    except OSError as error:
        raise CommandError(f"{log} cannot be read: {error.strerror}.") from error
    except KeyboardInterrupt:
        return


def _earlier_lines(log: Path) -> Iterator[str]:
    """Yield the lines of the log's newest earlier part, if it was rotated."""
    with contextlib.suppress(FileNotFoundError), earlier_part(log).open(errors="replace") as file:
        yield from _whole_lines(file)


def _whole_lines(file: TextIO) -> Iterator[str]:
    """Yield the complete lines from the current position; a partial line is left for the next call."""
    while True:
        position = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(position, os.SEEK_SET)
            return
        yield line.removesuffix("\n")


def _show(line: str, as_json: bool) -> None:
    click.echo(json.dumps({"line": line}) if as_json else line)
