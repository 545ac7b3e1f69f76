"""`ndif info`: which server runs here, and with what configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ndif.cli.admin import NoServerError, connect, nothing_runs, options


@click.command("info")
@click.option(
    "--config", "config", is_flag=True, help="Every variable, its value, and where that came from."
)
@click.option(
    "--env-example", is_flag=True, help="Print every variable with its default, as a file .env."
)
@click.option("--url", metavar="URL", help="With --config: a server elsewhere.")
@click.option("--token", metavar="TOKEN", help="Its token, or @FILE to read it from there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    config: bool, env_example: bool, url: str | None, token: str | None, as_json: bool
) -> None:
    """Show the server that runs here: its address, its process, its files."""
    if env_example:
        from ndif.variables import example

        click.echo(example(), nl=False)
    elif config:
        _config(url, token, as_json)
    elif url is not None:
        raise click.UsageError(
            "A session's files are on its server's machine; --url goes with --config."
        )
    else:
        _session(as_json)


def _session(as_json: bool) -> None:
    from dataclasses import asdict

    from ndif.cli.output import add_rows, console, show_json, table
    from ndif.services.places import places
    from ndif.session.folder import Sessions

    sessions = Sessions(options().session_root)
    running = sessions.running()
    found = places(sessions)
    if running is None:
        if not found:
            raise nothing_runs(sessions.root)
        if as_json:
            show_json({"services": found})
        else:
            made = table("Services", "", "")
            made.show_header = False
            console().print(add_rows(made, _services(found)))
        return
    session, record = running
    log = session.log("ray" if record.node_type == "worker" else "api")
    said = {**asdict(record), "folder": str(session.folder), "log": str(log), "services": found}
    if as_json:
        show_json(said)
        return
    settings = said.pop("settings")
    rows: list[tuple[str, Any]] = [
        ("address", record.url),
        ("process", record.pid),
        ("started", record.started),
        ("version", record.version),
        ("started with", " ".join(record.arguments)),
        ("folder", session.folder),
        ("log", log),
        *_services(found),
        *settings.items(),
    ]
    made = table(f"Session {record.session_id}", "", "")
    made.show_header = False
    console().print(add_rows(made, rows))


def _services(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    how = {True: "runs", False: "does not answer", None: "is Ray's to find"}
    return [
        (name, f"{said['address']}: {how[said['answers']]}, {said['whose']}")
        for name, said in found.items()
    ]


def _config(url: str | None, token: str | None, as_json: bool) -> None:
    from ndif.cli.output import add_rows, console, show_json, table, warn_of_unread

    settings, whose = _settings(url, token)
    warn_of_unread()
    if as_json:
        show_json({"settings": settings})
        return
    made = table(f"Configuration of {whose}", "variable", "value", "from", "default", "meaning")
    add_rows(
        made,
        (
            (
                each["name"],
                _text(each["value"]),
                each["source"],
                _text(each["default"]),
                each["meaning"],
            )
            for each in settings
        ),
    )
    console().print(made)


def _settings(url: str | None, token: str | None) -> tuple[list[dict[str, Any]], str]:
    """Of the server; where none runs, what one would be started with."""
    from dataclasses import asdict

    from ndif.variables import variables

    try:
        server = connect(url, token)
    except NoServerError:
        if url is not None:
            raise
        return [asdict(each) for each in variables(options())], "a server that is started now"
    return server.get("/admin/config")["settings"], f"the server at {server.url}"


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None or value == "" else str(value)
