"""`ndif logs`."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO

import click

from ndif.cli.admin import CommandError, options
from ndif.services.roles import ALONE
from ndif.session.folder import SERVICES

_POLL_S = 0.3


@click.command("logs")
@click.argument("service", default=SERVICES[0], type=click.Choice(SERVICES))
@click.option("-f", "--follow", is_flag=True, help="Go on, until the server ends or you interrupt.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="How many of the last.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each line as JSON.")
def command(service: str, follow: bool, lines: int, as_json: bool) -> None:
    """Show the log of the server here, or of the one that was here last."""
    from ndif.session.folder import Sessions

    sessions = Sessions(options().session_root)
    session = sessions.latest()
    alone = sessions.of(service).latest()
    if alone is not None and (session is None or not session.log(service).exists()):
        session = alone
    if session is None:
        raise CommandError(f"There was no session yet in {sessions.root}, so there is no log.")
    if service in ALONE and not session.log(service).exists():
        raise CommandError(f"{session.id} started no {service}: its log is where that runs.")
    try:
        with session.log(service).open(errors="replace") as file:
            for line in deque(_whole_lines(file), maxlen=lines):
                _show(line, as_json)
            while follow and (record := session.record()) is not None:
                # Asked first, so that the last lines of one that ends are not missed.
                alive = record.is_alive
                for line in _whole_lines(file):
                    _show(line, as_json)
                if not alive:
                    return
                time.sleep(_POLL_S)
    except OSError as error:
        raise CommandError(f"{session.log(service)} cannot be read: {error.strerror}.") from error
    except KeyboardInterrupt:
        return


def _whole_lines(file: TextIO) -> Iterator[str]:
    """What is there of it; a line that is being written comes the next time."""
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(place, os.SEEK_SET)
            return
        yield line.removesuffix("\n")


def _show(line: str, as_json: bool) -> None:
    import json

    click.echo(json.dumps({"line": line}) if as_json else line)
