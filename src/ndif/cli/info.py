"""`ndif info`: the server of this machine, and the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ndif.cli.server_client import NoServerError, connect, no_server, options


@click.command("info")
@click.option(
    "--config",
    "config",
    is_flag=True,
    help="Show every variable, its value and the value's source.",
)
@click.option(
    "--env-example", is_flag=True, help="Print every variable with its default, as an .env file."
)
@click.option("--url", metavar="URL", help="With --config: address of a server elsewhere.")
@click.option(
    "--token", metavar="TOKEN", help="Token of that server, or @FILE to read it from a file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    config: bool, env_example: bool, url: str | None, token: str | None, as_json: bool
) -> None:
    """Show the server of this machine: its address, process, files and services."""
    if env_example:
        from ndif.config.reference import example

        click.echo(example(), nl=False)
    elif config:
        _config(url, token, as_json)
    elif url is not None:
        raise click.UsageError(
            "--url needs --config: a session's files are on the server's own machine."
        )
    else:
        _session(as_json)


def _session(as_json: bool) -> None:
    from dataclasses import asdict

    from ndif.cli.output import add_rows, console, show_json, table
    from ndif.launch.run_folder import RunFolders
    from ndif.launch.services.plan import service_status

    run_folders = RunFolders(options().session_root)
    running = run_folders.running()
    services = service_status(run_folders)
    if running is None:
        if not services:
            raise no_server(run_folders.root)
        if as_json:
            show_json({"services": services})
        else:
            made = table("Services", "", "")
            made.show_header = False
            console().print(add_rows(made, _service_rows(services)))
        return
    run_folder, record = running
    log = run_folder.log("ray" if record.node_type == "worker" else "api")
    content = {
        **asdict(record),
        "folder": str(run_folder.folder),
        "log": str(log),
        "services": services,
    }
    if as_json:
        show_json(content)
        return
    rows: list[tuple[str, Any]] = [
        ("address", record.url),
        ("process", record.pid),
        ("started", record.started),
        ("version", record.version),
        ("started with", " ".join(record.arguments)),
        ("folder", run_folder.folder),
        ("log", log),
        *_service_rows(services),
        *record.settings.items(),
    ]
    made = table(f"Session {record.session_id}", "", "")
    made.show_header = False
    console().print(add_rows(made, rows))


def _service_rows(services: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    state = {True: "runs", False: "does not answer", None: "found by Ray"}
    return [
        (name, f"{service['address']}: {state[service['answers']]}, {service['whose']}")
        for name, service in services.items()
    ]


def _config(url: str | None, token: str | None, as_json: bool) -> None:
    from ndif.cli.output import add_rows, console, show_json, table, warn_of_unread_variables
    from ndif.config.reference import as_text

    settings, owner = _settings(url, token)
    warn_of_unread_variables()
    if as_json:
        show_json({"settings": settings})
        return
    made = table(f"Configuration of {owner}", "variable", "value", "source", "default", "meaning")
    add_rows(
        made,
        (
            (
                each["name"],
                as_text(each["value"]) or None,
                each["source"],
                as_text(each["default"]) or None,
                each["meaning"],
            )
            for each in settings
        ),
    )
    console().print(made)


def _settings(url: str | None, token: str | None) -> tuple[list[dict[str, Any]], str]:
    """Return the settings of the running server, or else of one started now, and whose they are."""
    from dataclasses import asdict

    from ndif.config.reference import variables

    try:
        server = connect(url, token)
    except NoServerError:
        if url is not None:
            raise
        return [asdict(each) for each in variables(options())], "a server that is started now"
    return server.get("/admin/config")["settings"], f"the server at {server.url}"
